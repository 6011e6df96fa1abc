"""Submissions that need no cluster: commands, addresses, and what is refused."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from patience import patience

from orchestrator.cli.main import main
from orchestrator.core.errors import SubmitError
from orchestrator.on_ray.jobs import (
    JobServer,
    Submission,
    new_submission_id,
    resolve_job_address,
)


def submission(tmp_path: Path, **changes: object) -> Submission:
    """A submission of ``grids/a b.yaml`` in a working directory."""
    values: dict[str, object] = {
        "grid": tmp_path / "grids" / "a b.yaml",
        "working_dir": tmp_path,
        "run": "night",
        "submission_id": "id",
    }
    return Submission(**(values | changes))  # type: ignore[arg-type]


def test_the_job_runs_the_command_one_would_type(tmp_path: Path) -> None:
    """The grid's path is relative to the upload, and words with blanks stay whole."""
    sent = submission(tmp_path, results="/data/my rows", arguments=("--retry-failed",))
    assert sent.entrypoint == (
        "exec python -m orchestrator run 'grids/a b.yaml' --run night "
        "--results '/data/my rows' --retry-failed"
    )


def test_a_grid_that_would_not_be_uploaded_is_refused(tmp_path: Path) -> None:
    """A grid outside the working directory, also through `..`."""
    outside = tmp_path / "work" / ".." / "grid.yaml"
    with pytest.raises(SubmitError, match="outside the directory that is uploaded"):
        _ = submission(tmp_path, grid=outside, working_dir=tmp_path / "work").entrypoint


def test_the_commit_travels_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster has no repository, so rows get the commit from the workstation."""
    monkeypatch.setenv("NIGHTGRID_GIT_COMMIT", "0123456789abcdef")
    monkeypatch.setenv("NIGHTGRID_GIT_DIRTY", "1")
    environment = submission(tmp_path).runtime_env(tmp_path / "staged")
    assert environment["working_dir"] == str(tmp_path / "staged")
    variables = environment["env_vars"]
    assert variables["NIGHTGRID_GIT_COMMIT"] == "0123456789abcdef"
    assert variables["NIGHTGRID_GIT_DIRTY"] == "1"
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > 30


def test_a_head_whose_agent_is_not_there_yet_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's job server answers before its agent does, and refuses after ten seconds; another
    refusal is final."""
    no_agent = "Request failed with status code 500: No available agent to submit job, please try"
    refusals = [RuntimeError(no_agent), RuntimeError("TimeoutError: Failed to get head node agent")]
    sent: list[str] = []
    deaths: list[OSError] = []
    gone: list[OSError] = []

    class Client:
        def __init__(self, _: str) -> None: ...

        def get_job_info(self, _: str) -> None:
            if gone:
                raise gone[0]
            raise RuntimeError("404: does not exist")

        def submit_job(self, **job: Any) -> str:
            assert Path(job["runtime_env"]["working_dir"], "grid.yaml").is_file()
            if refusals:
                raise refusals.pop(0)
            if deaths:
                gone.append(deaths.pop())
                raise gone[0]
            sent.append(job["submission_id"])
            return sent[-1]

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    monkeypatch.setattr("time.sleep", lambda _: None)
    (tmp_path / "grid.yaml").write_text("name: g\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = JobServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert server.submit(submission(tmp_path, grid=tmp_path / "grid.yaml"))
        assert sent == ["id"] and not refusals
        refusals.append(RuntimeError("500: no such thing"))
        with pytest.raises(SubmitError, match="no such thing"):
            server.submit(submission(tmp_path, grid=tmp_path / "grid.yaml"))
        deaths.append(ConnectionError("connection refused"))
        with pytest.raises(SubmitError, match="went away: connection refused"):
            server.submit(submission(tmp_path, grid=tmp_path / "grid.yaml"))


def test_ids_are_readable_and_differ() -> None:
    """The run's name is in it, and two are never the same."""
    ids = {new_submission_id("night") for _ in range(20)}
    assert len(ids) > 15 and all(each.startswith("nightgrid-night-") for each in ids)


@pytest.mark.parametrize("address", ["ray://head:10001", "ftp://head", "http://:8265", "head:xyz"])
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    """Ray has three kinds of address; only the dashboard's will do here."""
    with pytest.raises(SubmitError):
        resolve_job_address(address)


def test_no_address_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's RAY_ADDRESS is not a job server's."""
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(SubmitError, match="--address"):
        resolve_job_address(None)


def test_a_dead_address_is_told_quickly() -> None:
    """Seconds, not Ray's minutes."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(SubmitError, match=f"nothing answers at 127.0.0.1:{port}"):
            resolve_job_address(f"127.0.0.1:{port}")
        assert time.monotonic() - started < patience(6)


def test_hooks_travel_with_the_job_and_a_secret_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--notify` is passed on. An address would stand in the cluster's list of jobs for all to
    read, which is said; what is printed here shows its host alone."""
    sent: list[Submission] = []

    class Server:
        def __init__(self, address: str | None) -> None:
            self.address = "http://head:8265"

        def submit(self, submission: Submission) -> bool:
            sent.append(submission)
            return True

    monkeypatch.setattr("orchestrator.on_ray.jobs.JobServer", Server)
    (tmp_path / "grid.yaml").write_text(
        "name: g\ndefaults: {workload: text-generation, model: tiny-chatglm3, accelerator: HPU}\n"
        "experiments:\n  - name: e\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "grid.yaml", "--notify", "@/home/me/hook"]) == 0
    assert "note:" not in capsys.readouterr().err
    assert sent[0].arguments[-2:] == ("--notify", "@/home/me/hook")
    assert main(["submit", "grid.yaml", "--notify", "https://hooks.example.com/secret"]) == 0
    captured = capsys.readouterr()
    assert "--notify @FILE" in captured.err and "secret" not in captured.out + captured.err
    assert sent[1].entrypoint.endswith("--notify https://hooks.example.com/secret")
