"""`runs`, `stop`, `status` and `submit` of several grids, with a cluster whose helper jobs run
here: what each command asks for, finds, and says."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.main import build_parser, main
from orchestrator.core.errors import SubmitError
from orchestrator.core.status import CardStatus, RunStatus
from orchestrator.core.topology import parse_emulation
from orchestrator.on_ray.jobs import JobInfo, Submission
from orchestrator.store import files as run_files
from orchestrator.store.files import remove_stop_requests, stop_requests
from orchestrator.store.store import Store

GRID = (
    "name: {name}\ndefaults: {{workload: text-generation, accelerator: HPU}}\n"
    "experiments:\n  - name: e\n    model: tiny-chatglm3\n"
)


def status_of(run: str, **changes: Any) -> RunStatus:
    known: dict[str, Any] = {
        "run": run,
        "at": time.time(),
        "started_at": time.time() - 60,
        "total": 24,
        "done": 12,
        "counts": {},
        "attempts": 12,
        "emulated": False,
        "cards": (CardStatus(card="hpu-1/HPU0", phase="measure", job="bf16 b=4"),),
        "eta_s": 120.0,
    }
    return RunStatus(**known | changes)


def run_with(results: Path, run: str, **changes: Any) -> Store:
    """A run that a driver, now gone without a word, has begun."""
    store = Store.open(results, run)
    with store:
        store.write_file(run_files.STATUS, status_of(run, **changes).to_json())
    return store


class Server:
    """The job server of a cluster whose head is this machine."""

    address = "http://head:8265"
    jobs_there: tuple[JobInfo, ...] = ()

    def __init__(self, address: str | None) -> None:
        assert address == self.address
        self.sent_runs: list[Submission] = SENT
        self.stopped: list[str] = STOPPED

    def jobs(self) -> list[JobInfo]:
        return list(self.jobs_there)

    def sent(self, run: str) -> JobInfo | None:
        return next((job for job in self.jobs_there if run in (job.run, job.submission_id)), None)

    def submit(self, submission: Submission) -> bool:
        self.sent_runs.append(submission)
        return True

    def stop(self, submission_id: str) -> None:
        self.stopped.append(submission_id)

    def ask(
        self, arguments: Sequence[str], *, timeout_s: float, module: str = "orchestrator"
    ) -> str:
        if module == "orchestrator.on_ray.jobs":
            return "a line of Ray's\n" + json.dumps([asdict(node) for node in NODES]) + "\n"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main(list(arguments))
        return "2026-11-23 02:00:00,000\tINFO job_manager.py:568 -- Runtime env\n" + (
            printed.getvalue()
        )


NODES = parse_emulation("3x4:HPU", [])
SENT: list[Submission] = []
STOPPED: list[str] = []


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results directory on the head, to which a job of the run `night` was sent."""
    results = tmp_path / "there"
    job = JobInfo(
        submission_id="nightgrid-night-1",
        status="RUNNING",
        entrypoint="python -m orchestrator run grid.yaml",
        message="",
        started_at=time.time() - 60,
        ended_at=None,
        exit_code=None,
        run="night",
        results=str(results),
    )
    SENT.clear()
    STOPPED.clear()
    monkeypatch.setattr(Server, "jobs_there", (job,))
    monkeypatch.setattr("orchestrator.on_ray.jobs.JobServer", Server)
    monkeypatch.chdir(tmp_path)
    return results


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Type a command and return what it prints."""

    def type_in(*words: str, code: int = 0) -> str:
        assert main(list(words)) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    return type_in


THERE = ("--address", Server.address)


def test_runs_are_listed_with_their_states(there: Path, say: Callable[..., str]) -> None:
    run_with(there, "night", waiting="other (on h) has the cards")
    run_with(there, "done", finished=True, done=24, eta_s=0.0)
    here = say("runs", "--results", str(there), "--json")
    found = {each["run"]: each for each in json.loads(here)}
    assert found["done"]["state"] == "FINISHED" and found["done"]["eta_s"] is None
    # Its driver is this very process, which has given the lock back: nobody holds the run.
    assert found["night"]["state"] in ("WAITING", "DIED")
    assert found["night"]["done"] == 12 and found["night"]["total"] == 24
    printed = say("runs", *THERE, "--results", str(there))
    assert "12/24" in printed and "FINISHED" in printed and "24/24" in printed


def test_runs_that_have_not_begun_are_listed_too(
    there: Path, say: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [night] = Server.jobs_there
    results = ("--results", str(there))
    assert re.search(r"night +STARTING", say("runs", *THERE, *results))  # no directory yet
    Store.open(there, "night")
    run_with(there, "done", finished=True, done=24, eta_s=0.0)
    failed = replace(night, run="bad", status="FAILED", message="Traceback\nno such module")
    monkeypatch.setattr(Server, "jobs_there", (failed, night))
    printed = say("runs", *THERE, *results)
    assert re.search(r"bad +FAILED.*\n +no such module; nightgrid logs nightgrid-night-1", printed)
    assert re.search(r"night +STARTING", printed) and "FINISHED" in printed
    assert printed.count("night  ") == 1 and "?" not in printed


def test_a_run_that_was_sent_again_is_starting_until_its_new_driver_speaks(
    there: Path, say: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [night] = Server.jobs_there
    words = ("runs", *THERE, "--results", str(there))
    run_with(there, "night", at=time.time() - 3600, finished=True, done=24, eta_s=0.0)
    assert re.search(r"night +STARTING", say(*words))
    monkeypatch.setattr(Server, "jobs_there", (replace(night, status="SUCCEEDED"),))
    assert re.search(r"night +FINISHED", say(*words))
    monkeypatch.setattr(Server, "jobs_there", (night,))
    run_with(there, "night")
    assert "STARTING" not in say(*words)


def test_status_from_afar_by_name_and_by_job(there: Path, say: Callable[..., str]) -> None:
    store = run_with(there, "night")
    with store:  # a driver works on it
        for name in ("night", "nightgrid-night-1"):
            printed = say("status", name, *THERE)
            assert "nightgrid-night-1  RUNNING  run night" in printed
            assert "12/24 jobs" in printed and "about 2m00s left" in printed
            assert "hpu-1/HPU0  measure" in printed and "bf16 b=4" in printed
        told = json.loads(say("status", "night", *THERE, "--json"))
        assert told["run_status"]["status"]["done"] == 12 and told["run"] == "night"
    assert "run night" in say("status", *THERE)
    assert "no job and no run 'other'" in say("status", "other", *THERE, code=5)


def test_a_run_is_asked_to_stop_and_asked_again(there: Path, say: Callable[..., str]) -> None:
    store = run_with(there, "night")
    results = ("--results", str(there))
    assert "no driver works on run 'night'" in say("stop", "night", *results, code=4)
    with store:
        assert "asked to stop; what runs may end" in say("stop", "night", *results)
        assert stop_requests(store.path)[0] == 1
        assert "asked to stop at once" in say("stop", "night", *THERE)
        assert stop_requests(store.path)[0] == 2
        remove_stop_requests(store.path)
        assert json.loads(say("stop", "night", *THERE, "--now", "--json"))["requests"] == 2
        (store.path / run_files.STOP).write_text('{"requests": "many"}')
        assert stop_requests(store.path) == (0, "")
    assert STOPPED == []


def test_a_job_without_a_run_yet_is_stopped_by_ray(there: Path, say: Callable[..., str]) -> None:
    assert "stop" in say("stop", "night", *THERE)
    assert STOPPED == ["nightgrid-night-1"]
    say("stop", "unknown", *THERE, code=SubmitError.exit_code)


def test_a_plan_is_for_the_cluster_at_an_address(
    there: Path, tmp_path: Path, say: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.on_ray.jobs.JobServer", Server)
    (tmp_path / "g.yaml").write_text(GRID.format(name="g"))
    told = json.loads(say("plan", "g.yaml", *THERE, "--json"))
    assert [node["cards"] for node in told["nodes"]] == [4, 4, 4]
    assert "cannot be combined" in say("plan", "g.yaml", *THERE, "--emulate", "1x1", code=2)


def test_several_grids_are_sent_in_their_order(
    there: Path, tmp_path: Path, say: Callable[..., str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(GRID.format(name=name))
    printed = say("submit", "a.yaml", "b.yaml", "--priority", "3", *THERE, "--results", "/data")
    assert [each.run for each in SENT] == ["a", "b"] and printed.count("  sent:") == 2
    assert SENT[0].metadata == {
        "made_by": "nightgrid",
        "run": "a",
        "results": "/data",
        "priority": "3",
        "kinds": "HPU",
    }
    assert "--priority 3" in SENT[1].entrypoint
    told = json.loads(say("submit", "a.yaml", "b.yaml", *THERE, "--json").splitlines()[0])
    assert [each["run"] for each in told] == ["a", "b"]
    with pytest.raises(SystemExit):
        main(["submit", "a.yaml", "b.yaml", "--run", "c", *THERE])
    with pytest.raises(SystemExit):
        main(["submit", "a.yaml", "a.yaml", *THERE])
    (tmp_path / "a.yaml").write_text("results: /shared\n" + GRID.format(name="a"))
    say("submit", "a.yaml", *THERE)
    assert SENT[-1].metadata["results"] == "/shared" and "--results /shared" in SENT[-1].entrypoint
    (tmp_path / "a.yaml").write_text("results: ~/bench\n" + GRID.format(name="a"))
    say("submit", "a.yaml", *THERE)
    typed = shlex.split(SENT[-1].entrypoint)
    there_run = build_parser(["run"]).parse_args(typed[typed.index("run") :])
    assert there_run.results == Path.home() / "bench"  # no shell on the head has expanded it
    (tmp_path / "a.yaml").write_text("results: nights\n" + GRID.format(name="a"))
    assert "thrown away with the job" in say("submit", "a.yaml", *THERE, code=5)
