"""`runs`, `stop`, `status` and `submit`, here and on a cluster whose helper jobs run here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Head, Nightgrid, job_there
from measurements import numbers, row

from orchestrator.cli.main import build_parser
from orchestrator.cli.options import results_here
from orchestrator.core.errors import SubmitError
from orchestrator.core.status import CardStatus, RunStatus
from orchestrator.core.topology import parse_emulation
from orchestrator.on_ray.jobs import HeadJobFailed, JobInfo
from orchestrator.on_ray.run_status import serve_results
from orchestrator.store import files as run_files
from orchestrator.store.files import remove_stop_requests, stop_requests, submitter
from orchestrator.store.store import Store

GRID = (
    "name: {name}\ndefaults: {{workload: text-generation, accelerator: HPU}}\n"
    "experiments:\n  - name: e\n    model: tiny-chatglm3\n"
)
THERE = ("--address", Head.address)


def run_with(results: Path, run: str, **changes: Any) -> Store:
    """A run that a driver, now gone without a word, has begun."""
    values: dict[str, Any] = {
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
    store = Store(results, run)
    with store:
        store.write_file(run_files.STATUS, RunStatus(**values | changes).to_json())
    return store


@pytest.fixture
def there(tmp_path: Path, head: type[Head], workplace: Path) -> Path:
    """The results directory on the head, to which a job of the run `night` was sent."""
    results = tmp_path / "there"
    head.known.append(job_there("night", started_at=time.time() - 60, results=str(results)))
    return results


@pytest.fixture
def night(there: Path, head: type[Head]) -> JobInfo:
    return head.known[0]


def test_runs_are_listed_with_their_states(there: Path, nightgrid: Nightgrid) -> None:
    run_with(there, "night", waiting="other (on h) has the cards")
    run_with(there, "done", finished=True, done=24, eta_s=0.0)
    listed = {entry["run"]: entry for entry in nightgrid("runs", "--results", there, "--json").json}
    assert listed["done"]["state"] == "FINISHED" and listed["done"]["eta_s"] is None
    # Its driver is this very process, which has given the lock back: nobody holds the run.
    assert listed["night"]["state"] in ("WAITING", "DIED")
    assert listed["night"]["done"] == 12 and listed["night"]["total"] == 24
    printed = nightgrid("runs", *THERE, "--results", there).out
    assert "12/24" in printed and "FINISHED" in printed and "0 of 24 succeeded" in printed


def test_runs_that_have_not_begun_are_listed_too(
    there: Path, head: type[Head], night: JobInfo, nightgrid: Nightgrid
) -> None:
    command = ("runs", *THERE, "--results", there)
    assert re.search(r"night +STARTING", nightgrid(*command).out)  # no directory yet
    Store(there, "night")
    run_with(there, "done", finished=True, done=24, eta_s=0.0)
    head.known.insert(
        0, replace(night, run="bad", status="FAILED", message="Traceback\nno such module")
    )
    printed = nightgrid(*command).out
    assert re.search(r"bad +FAILED.*\n +no such module; nightgrid logs nightgrid-night-1", printed)
    assert re.search(r"night +STARTING", printed) and "FINISHED" in printed
    assert printed.count("night  ") == 1 and "?" not in printed


def test_a_run_that_was_sent_again_is_starting_until_its_new_driver_speaks(
    there: Path, head: type[Head], night: JobInfo, nightgrid: Nightgrid
) -> None:
    command = ("runs", *THERE, "--results", there)
    run_with(there, "night", at=time.time() - 3600, finished=True, done=24, eta_s=0.0)
    assert re.search(r"night +STARTING", nightgrid(*command).out)
    head.known[:] = [replace(night, status="SUCCEEDED")]
    assert re.search(r"night +FINISHED", nightgrid(*command).out)
    head.known[:] = [night]
    run_with(there, "night")
    assert "STARTING" not in nightgrid(*command).out


def test_status_from_afar_by_name_and_by_job(there: Path, nightgrid: Nightgrid) -> None:
    with run_with(there, "night"):  # a driver works on it
        for name in ("night", "nightgrid-night-1"):
            printed = nightgrid("status", name, *THERE).out
            assert "nightgrid-night-1  RUNNING  run night" in printed
            assert "12/24 jobs" in printed and "about 2m00s left" in printed
            assert "hpu-1/HPU0  measure" in printed and "bf16 b=4" in printed
        answer = nightgrid("status", "night", *THERE, "--json").json
        assert answer["run_status"]["status"]["done"] == 12 and answer["run"] == "night"
    assert "run night" in nightgrid("status", *THERE).out
    assert "no job and no run 'other'" in nightgrid("status", "other", *THERE, code=5).err


@pytest.fixture
def served(night: JobInfo, there: Path, head: type[Head], monkeypatch: pytest.MonkeyPatch) -> Store:
    """The run `night`, whose driver has linked it into the log directory of its session; a job on
    the head would fail."""
    job_directory = there.parent / "session/runtime_resources/working_dir_files/_ray_pkg_0"
    job_directory.mkdir(parents=True)
    store = run_with(there, "night", final_rows=12)
    with monkeypatch.context() as in_job:
        in_job.chdir(job_directory)
        serve_results(there)
        serve_results(there)  # once more, as each driver does
    monkeypatch.setattr(head, "logs", there.parent / "session/logs")

    def no_job(*_arguments: object, **_options: object) -> str:
        raise HeadJobFailed("a job was started on the head")

    monkeypatch.setattr(head, "ask", no_job)
    return store


def test_a_served_run_is_shown_without_a_job_on_the_head(
    served: Store, there: Path, head: type[Head], night: JobInfo, nightgrid: Nightgrid
) -> None:
    printed = nightgrid("status", "night", *THERE).out
    assert "12/24 jobs" in printed and f"rows: {there}/night/rows" in printed
    assert "hpu-1/HPU0  measure" in printed and "NO DRIVER" not in printed
    answer = nightgrid("status", "night", *THERE, "--json").json["run_status"]
    assert (answer["run"], answer["final_rows"], answer["rows"]) == (
        *("night", 12),
        str(served.tables_path),
    )
    runs = ("runs", *THERE, "--results", there)
    assert re.search(r"night +RUNNING +12/24", nightgrid(*runs).out)
    head.known[:] = [replace(night, status="FAILED", ended_at=time.time())]
    printed = nightgrid("status", "night", *THERE).out
    assert "NO DRIVER" in printed and "measure" not in printed
    assert re.search(r"night +DIED", nightgrid(*runs).out)


def test_a_served_run_is_fetched_without_a_job_and_again_only_what_is_new(
    served: Store, nightgrid: Nightgrid, tmp_path: Path
) -> None:
    fetch = ("fetch", "night", *THERE, "--results", tmp_path / "here", "--json")
    with served:
        served.append(row(1))
        first = nightgrid(*fetch).json
        assert first["finished"] and not first["damaged"] and len(first["received"]) == 2
        served.to_parquet()
        (parquet,) = nightgrid(*fetch).json["received"][:-1]
        assert nightgrid(*fetch).json["received"] == [run_files.STATUS]
    assert numbers(Store.existing(tmp_path / "here", "night")) == [1]
    (tmp_path / "here" / "night" / parquet).write_bytes(b"torn")
    assert nightgrid(*fetch, "--as", "other").json["received"] == [parquet, run_files.STATUS]


def test_a_run_that_no_driver_has_linked_is_linked_by_a_job_on_the_head(
    served: Store, there: Path, head: type[Head], nightgrid: Nightgrid, tmp_path: Path, monkeypatch
) -> None:
    shutil.rmtree(there.parent / "session/logs/nightgrid")

    def ask(self: Head, arguments: list[str], *, results: str) -> str:
        with monkeypatch.context() as in_job:
            in_job.chdir(there.parent / "session/runtime_resources/working_dir_files/_ray_pkg_0")
            return Head.ask(self, arguments, results=results)

    monkeypatch.setattr(head, "ask", ask)
    nightgrid("fetch", "night", *THERE, "--results", tmp_path / "here")
    assert Store.existing(tmp_path / "here", "night").exists
    fetch = ("fetch", "day", *THERE, "--from", there, "--results", tmp_path / "here")
    assert "there is no run 'day'" in nightgrid(*fetch, code=4).err


def test_a_silent_driver_that_nobody_submitted_is_looked_at_on_the_head(
    served: Store, there: Path, head: type[Head], nightgrid: Nightgrid
) -> None:
    head.known.clear()
    words = ("status", "night", *THERE, "--results", there)
    assert "12/24 jobs" in nightgrid(*words).out
    run_with(there, "night", at=time.time() - 300)
    assert "a job was started on the head" in nightgrid(*words, code=5).err


def test_a_head_that_is_gone_is_named_with_what_was_last_seen_of_it(
    served: Store, there: Path, head: type[Head], nightgrid: Nightgrid
) -> None:
    nightgrid("status", "night", *THERE)
    head.gone = True
    for words in (("status", "night"), ("status",), ("runs",)):
        lines = nightgrid(*words, *THERE, code=5).err
        assert "nothing answers at head:8265" in lines and "Last seen from here" in lines
        assert "nightgrid-night-1  RUNNING  run night" in lines
        assert "12/24 jobs" in lines and f"rows: {there}/night/rows" in lines
        assert "the same `nightgrid submit` measures only what is missing" in lines
    head.gone = False
    head.known.clear()  # it was started again
    listed = nightgrid("status", *THERE).out
    assert "no Nightgrid job" in listed and "nightgrid-night-1  RUNNING  run night" in listed


def test_a_run_is_asked_to_stop_and_asked_again(
    there: Path, head: type[Head], nightgrid: Nightgrid
) -> None:
    store = run_with(there, "night")
    command = ("stop", "night", "--results", there)
    assert "no driver works on run 'night'" in nightgrid(*command, code=4).err
    with store:
        assert "asked to stop; what runs may end" in nightgrid(*command).out
        assert stop_requests(store.path)[0] == 1
        assert "asked to stop at once" in nightgrid("stop", "night", *THERE).out
        assert stop_requests(store.path)[0] == 2
        remove_stop_requests(store.path)
        assert nightgrid("stop", "night", *THERE, "--now", "--json").json["requests"] == 2
        (store.path / run_files.STOP).write_text('{"requests": "many"}')
        assert stop_requests(store.path) == (0, "")
    assert head.stopped == []


def test_a_job_without_a_run_yet_is_stopped_by_ray(
    there: Path, head: type[Head], nightgrid: Nightgrid
) -> None:
    assert "stop" in nightgrid("stop", "night", *THERE).out
    assert head.stopped == ["nightgrid-night-1"]
    nightgrid("stop", "unknown", *THERE, code=SubmitError.exit_code)


def test_a_plan_is_for_the_cluster_at_an_address(
    there: Path, head: type[Head], nightgrid: Nightgrid
) -> None:
    head.nodes = parse_emulation("3x4:HPU", [])
    Path("g.yaml").write_text(GRID.format(name="g"))
    plan = nightgrid("plan", "g.yaml", *THERE, "--json").json
    assert [node["cards"] for node in plan["nodes"]] == [4, 4, 4]
    refused = nightgrid("plan", "g.yaml", *THERE, "--emulate", "1x1", code=2)
    assert "cannot be combined" in refused.err


def test_several_grids_are_sent_in_their_order(
    there: Path, head: type[Head], nightgrid: Nightgrid
) -> None:
    for name in ("a", "b"):
        Path(f"{name}.yaml").write_text(GRID.format(name=name))
    both = ("submit", "a.yaml", "b.yaml", *THERE)
    printed = nightgrid(*both, "--priority", 3, "--wait-for-cards", 600, "--results", "/data").out
    first, second = head.submissions
    assert (first.run, second.run) == ("a", "b") and printed.count("  sent:") == 2
    assert first.metadata == {
        "made_by": "nightgrid", "run": "a", "results": "/data", "priority": "3", "kinds": "HPU",
        "submitter": submitter(),
    }  # fmt: skip
    assert "--priority 3" in second.entrypoint and "--wait-for-cards=600" in second.entrypoint
    sent = json.loads(nightgrid(*both, "--json").out.splitlines()[0])
    assert [job["run"] for job in sent] == ["a", "b"]
    nightgrid(*both, "--run", "c", code=2)
    nightgrid("submit", "a.yaml", "a.yaml", *THERE, code=2)


def test_results_that_a_grid_names_are_those_of_the_head(
    there: Path, head: type[Head], nightgrid: Nightgrid
) -> None:
    def submit(results: str, code: int = 0) -> str:
        Path("a.yaml").write_text(f"results: {results}\n{GRID.format(name='a')}")
        return nightgrid("submit", "a.yaml", *THERE, code=code).all

    submit("/shared")
    (sent,) = head.submissions
    assert sent.metadata["results"] == "/shared" and "--results /shared" in sent.entrypoint
    submit("~/bench")
    typed = shlex.split(head.submissions[-1].entrypoint)
    run = build_parser(["run"]).parse_args(typed[typed.index("run") :])
    assert results_here(run) == Path.home() / "bench"  # no shell on the head has expanded it
    assert "thrown away with the job" in submit("nights", code=5)


def test_a_run_that_another_person_sent_is_refused_before_anything_is_uploaded(
    there: Path, head: type[Head], nightgrid: Nightgrid
) -> None:
    def sent(owner: str, exit_code: int | None = None) -> JobInfo:
        return job_there("a", results="/data", submitter=owner, exit_code=exit_code)

    Path("a.yaml").write_text(GRID.format(name="a"))
    submit = ("submit", "a.yaml", *THERE, "--results", "/data")
    head.known[:] = [sent("ben@desk", 2), sent("anna@laptop", 0)]
    refused = nightgrid(*submit, code=2).err
    assert "a.yaml:1:" in refused and "run 'a' belongs to anna@laptop" in refused
    assert f"is sent by {submitter()}" in refused and "--run a-" in refused
    assert not head.submissions
    nightgrid(*submit, "--run", "b")
    nightgrid(*submit[:-1], "/elsewhere")
    nightgrid(*submit, "--", "--resume")
    head.known[:] = [sent(submitter()), *head.known]
    nightgrid(*submit)
    assert len(head.submissions) == 4
