"""Commands typed in this process or in one of their own, a workplace for them, and a cluster's head
that is here."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_workload

from orchestrator.cli.main import full_parser, main
from orchestrator.core.topology import Node
from orchestrator.on_ray.jobs import (
    HeadJobFailed,
    JobInfo,
    JobServer,
    NoAnswer,
    Submission,
    nodes_here,
)

ROOT = Path(__file__).resolve().parents[1]


def started(*words: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """`nightgrid` in a process of its own: the leader of a session, outside any cluster of this
    process; packages of the working directory are installed. Its errors go where its output does,
    to a pipe."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *words],
        cwd=cwd,
        env=outside | {"PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


class Printed(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def all(self) -> str:
        return self.out + self.err


class Nightgrid:
    """Types commands and returns what they print; an exit code other than ``code`` fails, unless
    that is None."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: object, code: int | None = 0) -> Printed:
        self._capture.readouterr()
        try:
            ended = main([str(word) for word in words])
        except SystemExit as refused:  # of argparse
            ended = int(str(refused.code))
        printed = Printed(ended, *self._capture.readouterr())
        assert code in (None, ended), printed
        return printed


@pytest.fixture
def nightgrid(capsys: pytest.CaptureFixture[str]) -> Nightgrid:
    return Nightgrid(capsys)


@pytest.fixture
def workplace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A fresh working directory, in which the tiny workload is known."""
    tiny_workload.register(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "NIGHTGRID_RESULTS", "NIGHTGRID_NOTIFY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    kinds = argparse._SubParsersAction
    (commands,) = (action for action in full_parser()._actions if isinstance(action, kinds))
    return dict(commands.choices)


def job_there(run: str, **changes: Any) -> JobInfo:
    values: dict[str, Any] = {
        "submission_id": f"nightgrid-{run}-1",
        "status": "RUNNING",
        "entrypoint": "python -m orchestrator run grid.yaml",
        "message": "",
        "started_at": 1000.0,
        "ended_at": None,
        "exit_code": None,
        "run": run,
    }
    return JobInfo(**values | changes)


class Head:
    """The job server of a cluster whose helper jobs run in this process; ``head`` makes one."""

    address = "http://head:8265"
    known: list[JobInfo]
    submissions: list[Submission]
    stopped: list[str]
    nodes: Sequence[Node] = ()
    logs: Path | None = None  # the log directory of its session
    gone: bool = False

    def __init__(self, address: str | None) -> None:
        assert address == self.address
        if self.gone:
            raise NoAnswer("nothing answers at head:8265: Connection refused")
        self.client = self

    def head_files(self, pattern: str) -> list[str]:
        if self.logs is None:
            return []
        return sorted(str(path.relative_to(self.logs)) for path in self.logs.glob(pattern))

    def head_file(self, path: str) -> bytes:
        assert self.logs is not None
        return (self.logs / path).read_bytes()

    answer, json_in = JobServer.answer, JobServer.json_in

    def call(self, function: Callable[..., Any]) -> Any:
        assert function is nodes_here
        return self.json_in("a line of Ray's\n" + json.dumps([*map(asdict, self.nodes)]) + "\n")

    def jobs(self) -> list[JobInfo]:
        return list(self.known)

    def sent(self, run: str) -> JobInfo | None:
        return next((job for job in self.known if run in (job.run, job.submission_id)), None)

    def submit(self, submission: Submission) -> bool:
        self.submissions.append(submission)
        return True

    def stop(self, submission_id: str) -> None:
        self.stopped.append(submission_id)

    def ask(
        self,
        arguments: Sequence[str],
        *,
        results: str = "",
        timeout_s: float = 0.0,
        may_fail: bool = False,
    ) -> str:
        where = ["--results", results] if results else []
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main([*arguments, *where])
        if code and not may_fail:
            raise HeadJobFailed(f"{self.address}: {printed.getvalue()}")
        return printed.getvalue().strip()


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Head]:
    """A head with no jobs yet, in the place of every job server; nothing was seen of it."""

    class Fresh(Head):
        known, submissions, stopped = [], [], []

    # The home of the class last: a module that is imported for its own patch takes the real one.
    for module in ("cli.doctor", "cli.remote", "cli.runs", "on_ray.run_status", "on_ray.jobs"):
        monkeypatch.setattr(f"orchestrator.{module}.JobServer", Fresh)
    monkeypatch.setattr("orchestrator.cli.runs.cache_root", lambda: tmp_path / "cache")
    return Fresh
