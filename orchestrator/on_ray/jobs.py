"""Ray jobs on a cluster's head: grids that are sent there, and questions about its runs.

A job is the very command one would type on the cluster (`python -m orchestrator run …`), with the
program, the grid and what the grid names uploaded beside it (``upload.py``). Its submission id is
chosen here, so that a submission that is repeated, because the answer got lost or the laptop was
closed, finds the job instead of starting a second one. Only Ray's job client is used: the
workstation needs no more of the cluster than the dashboard's port, at which its job server listens.

The driver of a submitted run and a head job (a command of this program that answers a question) run
on the head node, so the head job finds the run's files where the driver writes them: where the
submission said, else in the home directory there. ``python -m orchestrator.on_ray.jobs`` is the
head job that prints the nodes of its cluster, for a workstation, which cannot join.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from orchestrator.core.errors import SubmitError
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Node
from orchestrator.on_ray.cluster import (
    asks_for_token,
    connect,
    missing_token,
    take_own_token,
    token_advice,
)
from orchestrator.on_ray.run_queue import KINDS, MADE_BY, PRIORITY, RESULTS, RUN
from orchestrator.on_ray.upload import Upload, program_files, upload_of
from orchestrator.store.files import VARIABLE as RESULTS_VARIABLE
from orchestrator.store.files import is_address
from orchestrator.util import output
from orchestrator.util.redaction import error_line
from orchestrator.worker.environment import GIT_COMMIT_VARIABLE, GIT_DIRTY_VARIABLE, git_state

if TYPE_CHECKING:
    from orchestrator.core.job import Job

#: Modules of Ray that tell of each package which they upload.
_CHATTERERS = (
    "ray.dashboard.modules.job.sdk",
    "ray.dashboard.modules.dashboard_sdk",
    "ray._private.runtime_env.packaging",
)
_HELPER_END_S = 10.0  # Ray kills a job 3 s after it was asked to end
#: Time for a stopped job to end its workers and write its last rows (Ray's own: 3 s).
_STOP_WAIT_S = 120
ANSWER_S = 120.0
DEFAULT_PORT = 8265
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_CONNECT_S = 5.0
#: Ray's own lines of a job's log, before what the command prints.
_RAYS = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\tINFO |Running entrypoint for job ")
#: A head node that has just started, or is busy, answers before its agent can start jobs. Ray
#: gives that agent ten seconds, which cannot be changed, and asks to try again.
_AGENT_PATIENCE_S = 120.0
_NO_AGENT_YET = re.compile(r"No available agent to submit job|Failed to get head node agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run to be sent. ``grid`` lies inside ``working_dir``; ``results`` is a path on the
    cluster."""

    grid: Path
    working_dir: Path
    run: str
    submission_id: str
    results: str | None = None
    arguments: tuple[str, ...] = ()  # more of `nightgrid run`
    jobs: tuple[Job, ...] = ()  # of the grid
    priority: int = 0  # in the cluster's queue of runs
    include: tuple[str, ...] = ()  # more that is uploaded from ``working_dir``

    @property
    def entrypoint(self) -> str:
        """The command that the cluster runs.

        Raises:
            SubmitError: the grid is not in the working directory, so would not be uploaded.
        """
        try:
            grid = self.grid.resolve().relative_to(self.working_dir.resolve())
        except ValueError:
            raise SubmitError(
                f"{self.grid} is outside the directory that is uploaded, "
                f"{self.working_dir.resolve()}; copy it there, or give --working-dir"
            ) from None
        # Ray ends a job whose head has died by ending the shell that it was started with; what the
        # shell has started lives on. So it is replaced.
        command = ["exec", "python", "-m", "orchestrator", "run", grid.as_posix()]
        command += ["--run", self.run]
        if self.results is not None:
            command += ["--results", self.results]
        if self.priority:
            command += ["--priority", str(self.priority)]
        return shlex.join([*command, *self.arguments])

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata in the cluster's list of jobs: for its place in the queue of runs, and for those
        who look for its results."""
        kinds = sorted({job.accelerator.value for job in self.jobs})
        known = {
            MADE_BY: "nightgrid",
            RUN: self.run,
            RESULTS: self.results or os.environ.get(RESULTS_VARIABLE, ""),
            PRIORITY: str(self.priority),
        }
        return known | ({KINDS: ",".join(kinds)} if kinds else {})

    def upload(self) -> Upload:
        """The files that travel.

        Raises:
            SubmitError: something of it is refused (``upload_of``).
        """
        return upload_of(self.grid, self.jobs, self.working_dir, self.include)

    def runtime_env(self, directory: Path) -> dict[str, Any]:
        """The runtime environment: ``directory``, which Ray uploads, and the variables that it
        sets."""
        state = git_state()
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S), "PYTHONUNBUFFERED": "1"}
        if state.commit is not None:
            variables[GIT_COMMIT_VARIABLE] = state.commit
        if state.dirty is not None:
            variables[GIT_DIRTY_VARIABLE] = "1" if state.dirty else "0"
        if results := os.environ.get(RESULTS_VARIABLE):
            variables[RESULTS_VARIABLE] = results
        return {"working_dir": str(directory), "env_vars": variables}


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions that must agree between the places a run spans."""

    ray: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as the cluster knows it. Times are seconds since the epoch."""

    run: str = ""  # its name, where Nightgrid sent it
    results: str = ""  # directory on the cluster, where one was named

    submission_id: str
    status: str  # PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED
    entrypoint: str
    message: str
    started_at: float | None
    ended_at: float | None
    exit_code: int | None

    @property
    def over(self) -> bool:
        """Return whether it has ended, in whatever state."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


class JobServer:
    """The job server of a cluster.

    Raises:
        SubmitError: nothing answers there, or not as a Ray job server.
    """

    def __init__(self, address: str | None) -> None:
        self.address = resolve_job_address(address)
        take_own_token()
        if missing := missing_token():
            raise SubmitError(missing)
        from ray.job_submission import JobSubmissionClient

        for name in _CHATTERERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            self._client = JobSubmissionClient(self.address)
        except Exception as error:
            if asks_for_token(error):
                raise SubmitError(token_advice(f"the cluster at {self.address}")) from error
            raise SubmitError(
                f"{self.address} does not answer as a Ray job server: {error_line(error)}"
            ) from error

    def submit(self, submission: Submission) -> bool:
        """Send a grid; False if a job of this id and command is there already.

        Raises:
            SubmitError: the id belongs to another command, or the cluster refuses.
        """
        entrypoint = submission.entrypoint
        earlier = self._find(submission.submission_id)
        if earlier is None:
            try:
                with submission.upload().staged() as directory:
                    self._send(
                        entrypoint=entrypoint,
                        submission_id=submission.submission_id,
                        runtime_env=submission.runtime_env(directory),
                        metadata=submission.metadata,
                    )
                return True
            except SubmitError:
                raise  # nothing was sent
            except Exception as error:
                try:  # somebody was quicker, or it arrived after all
                    earlier = self._find(submission.submission_id)
                except OSError:
                    raise SubmitError(f"{self.address} went away: {error_line(error)}") from error
                if earlier is None:
                    raise SubmitError(
                        f"{self.address} refuses the job: {error_line(error)}"
                    ) from error
        if earlier.entrypoint != entrypoint:
            raise SubmitError(
                f"job {submission.submission_id} is there already ({earlier.status}) with another "
                f"command:\n    {earlier.entrypoint}\nChoose another --submission-id."
            )
        return False

    def ask(
        self, arguments: Sequence[str], *, timeout_s: float, module: str = "orchestrator"
    ) -> str:
        """Run a command, or another module, of this program as a Ray job on the head node; return
        what it prints.

        Raises:
            SubmitError: the cluster refuses, or the command takes too long (it is stopped then).
        """
        with self.helper(module, arguments) as name:
            deadline = time.monotonic() + timeout_s
            while not self.job(name).over:
                if time.monotonic() > deadline:
                    command = " ".join((module, *arguments[:1]))
                    raise SubmitError(
                        f"{self.address}: `{command}` had not ended after {timeout_s:.0f} s"
                    )
                time.sleep(0.5)
            return self.logs(name)

    @contextlib.contextmanager
    def helper(
        self, module: str, arguments: Sequence[str], files: Mapping[str, Path] | None = None
    ) -> Iterator[str]:
        """A module of this program as a Ray job on the head node, with these files beside it; its
        submission id. It is gone with the block, and what it printed as well.

        Raises:
            SubmitError: the cluster refuses.
        """
        try:
            with Upload(program=program_files(), named=files or {}).staged() as directory:
                name = self._send(
                    entrypoint=shlex.join(["exec", "python", "-m", module, *arguments]),
                    runtime_env={
                        "working_dir": str(directory),
                        "env_vars": {ADDRESS_VARIABLES[0]: ""},  # there it asks its own cluster
                    },
                )
        except Exception as error:
            raise SubmitError(f"{self.address} refuses the job: {error_line(error)}") from error
        try:
            yield name
        finally:
            with contextlib.suppress(Exception):  # it is of no interest any more
                if not self.job(name).over:
                    self._client.stop_job(name)
                deadline = time.monotonic() + _HELPER_END_S
                while not self.job(name).over and time.monotonic() < deadline:
                    time.sleep(0.2)
                self._client.delete_job(name)

    def stop(self, submission_id: str) -> None:
        """Have Ray end a job: an orderly end is asked for, and forced after two minutes."""
        self._client.stop_job(self.job(submission_id).submission_id)

    def _send(self, **job: Any) -> str:
        """Submit a job, as soon as the head node's agent is there."""
        deadline = time.monotonic() + _AGENT_PATIENCE_S
        while True:
            try:
                name: str = self._client.submit_job(**job)
                return name
            except RuntimeError as error:
                if not _NO_AGENT_YET.search(str(error)) or time.monotonic() > deadline:
                    raise
            time.sleep(1.0)

    def job(self, submission_id: str) -> JobInfo:
        """One job.

        Raises:
            SubmitError: there is none of this id; the message lists those there are.
        """
        info = self._find(submission_id)
        if info is None:
            known = ", ".join(job.submission_id for job in self.jobs()[:5]) or "none"
            raise SubmitError(
                f"no job '{submission_id}' at {self.address}; the newest there: {known}"
            )
        return info

    def sent(self, run: str) -> JobInfo | None:
        """The job of this submission id, else the newest one that drives a run of this name; None
        if there is neither."""
        jobs = self.jobs()
        by_id = [job for job in jobs if job.submission_id == run]
        return next(iter(by_id or [job for job in jobs if job.run == run]), None)

    def jobs(self) -> list[JobInfo]:
        """Every submitted job that Nightgrid made, the newest first."""
        listed = [job for job in self._client.list_jobs() if job.submission_id]
        made_here = [job for job in listed if (job.metadata or {}).get(MADE_BY) == "nightgrid"]
        return [
            _info(job) for job in sorted(made_here, key=lambda j: j.start_time or 0, reverse=True)
        ]

    def logs(self, submission_id: str) -> str:
        """All that the job has printed so far."""
        self.job(submission_id)
        logs: str = self._client.get_job_logs(submission_id)
        return logs

    def follow(self, submission_id: str, write: Callable[[str], object]) -> JobInfo:
        """Write the job's output as it comes, from its start, until the job is over.

        A connection that breaks is made again and goes on where it was.

        Raises:
            SubmitError: there is no such job, or the cluster stays away for a minute.
        """
        self.job(submission_id)
        seen = 0
        silent_since = time.monotonic()
        while True:
            try:
                info = self.job(submission_id)
                fresh = asyncio.run(self._write_from(submission_id, seen, write))
                seen += fresh
                if info.over and not fresh:
                    return info
                silent_since = time.monotonic()
                if not fresh:
                    time.sleep(0.5)
            except (OSError, RuntimeError, asyncio.TimeoutError) as error:
                if time.monotonic() - silent_since > 60:
                    raise SubmitError(f"{self.address} went away: {error_line(error)}") from error
                time.sleep(1.0)

    async def _write_from(
        self, submission_id: str, seen: int, write: Callable[[str], object]
    ) -> int:
        """Write what comes after the first ``seen`` characters; how many those were."""
        position = 0
        stream: AsyncIterator[str] = self._client.tail_job_logs(submission_id)
        async for chunk in stream:
            start = max(0, seen - position)
            position += len(chunk)
            if start < len(chunk):
                write(chunk[start:])
        return max(0, position - seen)

    def _find(self, submission_id: str) -> JobInfo | None:
        try:
            return _info(self._client.get_job_info(submission_id))
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise SubmitError(f"{self.address}: {error_line(error)}") from error


# ---------------------------------------------------------------- head jobs


def ask_there(
    server: JobServer, arguments: Sequence[str], results: str | None, job: JobInfo | None = None
) -> str:
    """The output of a command of this program on the head.

    Args:
        results: the directory there; None: that of ``job``, else where runs go by default there.

    Raises:
        SubmitError: it failed; the message has what it printed.
    """
    directory = directory_there(results, job)
    printed = server.ask(
        [*arguments, *(["--results", directory] if directory else [])], timeout_s=ANSWER_S
    )
    return "\n".join(line for line in printed.splitlines() if not _RAYS.match(line))


def directory_there(results: str | None, job: JobInfo | None) -> str:
    """The directory of results on the head: the one that is named, else that of the job; empty
    where runs go by default."""
    directory = results or (job.results if job is not None else "")
    return "" if is_address(directory) else directory


def ask_json(
    server: JobServer, arguments: Sequence[str], results: str | None, job: JobInfo | None = None
) -> Any:
    """The JSON document that a command prints there, from a line that begins with it to the end.

    Raises:
        SubmitError: it failed; the message has what it printed.
    """
    printed = ask_there(server, [*arguments, "--json"], results, job)
    lines = printed.splitlines()
    for first, line in enumerate(lines):
        if line.startswith(("{", "[")):
            with contextlib.suppress(ValueError):
                return json.loads("\n".join(lines[first:]))
    refusal = printed.partition(f"nightgrid {arguments[0]}: ")[2] or printed
    raise SubmitError(f"{server.address}: {refusal.strip()[-500:] or 'no answer'}")


def nodes_at(address: str) -> list[Node]:
    """The nodes with cards of the cluster at an address of either kind.

    Raises:
        ClusterError: it cannot be joined.
        SubmitError: the dashboard does not answer, or not with nodes.
    """
    if not is_job_address(address):
        with connect(address) as cluster:
            return cluster.nodes()
    server = JobServer(address)
    printed = server.ask((), module="orchestrator.on_ray.jobs", timeout_s=ANSWER_S)
    for line in printed.splitlines():
        if line.startswith("["):
            return [node_of_json(values) for values in json.loads(line)]
    raise SubmitError(f"{server.address} does not say what nodes it has: {printed.strip()[-500:]}")


def node_of_json(values: Mapping[str, Any]) -> Node:
    """The node that ``main`` has printed."""
    packages = values["packages"]
    converted = {
        "accelerator": Accelerator(values["accelerator"]),
        "card_indices": tuple(values["card_indices"]),
        "packages": packages and tuple((name, version) for name, version in packages),
    }
    return Node(**{**values, **converted})


def main(arguments: Sequence[str] = ()) -> int:
    """Print the nodes of the cluster that this process is in."""
    with connect("auto") as cluster:
        nodes = cluster.nodes()
    output.say_json([dataclasses.asdict(node) for node in nodes])
    return 0


# ---------------------------------------------------------------- the job server's address


def is_job_address(address: str | None) -> bool:
    """Return whether this, or else the environment, names a job server and not a GCS."""
    known = address or next(filter(None, map(os.environ.get, ADDRESS_VARIABLES)), "")
    return known.startswith(("http://", "https://"))


def resolve_job_address(address: str | None) -> str:
    """The URL of a job server that listens, from ``--address`` or the environment.

    Raises:
        SubmitError: none is given, it is of another kind, or nothing listens there.
    """
    named = {name: os.environ.get(name, "") for name in ADDRESS_VARIABLES}
    chosen = address or next((value for value in named.values() if value.startswith("http")), "")
    if not chosen:
        raise SubmitError(
            "no cluster to talk to: give --address http://HEAD:8265 (the dashboard's address), "
            f"or set {ADDRESS_VARIABLES[0]}"
        )
    if "://" not in chosen:
        chosen = f"http://{chosen}"
    try:
        parts = urlsplit(chosen)
        port = parts.port or (443 if parts.scheme == "https" else DEFAULT_PORT)
    except ValueError as error:
        raise SubmitError(f"'{chosen}' is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SubmitError(f"'{chosen}' is not a job server; it has the form http://HEAD:8265")
    try:
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:  # a ValueError: no host can be named so
        raise SubmitError(
            f"nothing answers at {parts.hostname}:{port}: {error}. Is the head node up "
            "(`ray start --head`), its dashboard reachable from here (it listens on its own "
            "loopback unless given --dashboard-host), or an SSH tunnel needed?"
        ) from error
    return chosen if parts.port or parts.scheme == "https" else f"{chosen.rstrip('/')}:{port}"


def versions_here() -> Versions:
    """Ray and Python of this process."""
    import ray

    return Versions(ray=ray.__version__, python=platform.python_version())


def new_submission_id(run: str) -> str:
    """A fresh id: the run's name, the time, and four random digits."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"nightgrid-{run}-{stamp}-{os.urandom(2).hex()}"


def _info(job: Any) -> JobInfo:
    return JobInfo(
        submission_id=job.submission_id,
        status=str(getattr(job.status, "value", job.status)),
        entrypoint=job.entrypoint,
        message=job.message or "",
        started_at=job.start_time / 1000 if job.start_time else None,
        ended_at=job.end_time / 1000 if job.end_time else None,
        exit_code=job.driver_exit_code,
        run=str((job.metadata or {}).get(RUN, "")),
        results=str((job.metadata or {}).get(RESULTS, "")),
    )


if __name__ == "__main__":
    sys.exit(main())
