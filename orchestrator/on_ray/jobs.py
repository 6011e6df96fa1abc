"""Ray jobs on a cluster's head: submitted grids, and queries of its runs.

A job runs the command one would type there, with the program, the grid and the files it names
uploaded (``upload.py``). Its submission id is chosen here, so that a repeated submission finds it.
Submitted drivers and head jobs (commands that answer a query) both run on the head node, so head
jobs find the runs' files. As a program, this module calls a function for a workstation.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.core.errors import SubmitError
from orchestrator.core.job import Accelerator, Job
from orchestrator.core.topology import Node
from orchestrator.on_ray.cluster import (
    asks_for_token,
    connect,
    described,
    own_token,
    take_own_token,
    token_advice,
)
from orchestrator.on_ray.job_client import JobClient
from orchestrator.on_ray.run_queue import KINDS, MADE_BY, PRIORITY, RESULTS, RUN, SUBMITTER
from orchestrator.on_ray.upload import Upload, name_there, program_files, upload_of
from orchestrator.store.files import SUBMITTER_VARIABLE, is_address, submitter
from orchestrator.store.files import VARIABLE as RESULTS_VARIABLE
from orchestrator.util import output
from orchestrator.util.host import bypass_proxies
from orchestrator.util.redaction import error_line
from orchestrator.worker.environment import GIT_COMMIT_VARIABLE, GIT_DIRTY_VARIABLE, git_state
from orchestrator.worker.orphans import private_directory

_REFUSED = (2, 3, 4)  # exit codes of a job that may have left its run as it was
_HELPER_END_S = 10.0  # Ray kills a job 3 s after it was asked to end
#: Time for a stopped job to end its workers and write its last rows (Ray's own: 3 s).
_STOP_WAIT_S = 120
ANSWER_S = 120.0
_CALL = "call.json"
DEFAULT_PORT = 8265
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_CONNECT_S = 5.0
#: Ray's own words with 401 and 403; a proxy's are others.
_RAYS_REFUSAL = re.compile(r"(Missing|Invalid) authentication token")
_OF_A_GATEWAY = re.compile(r"\b(407|502|504)\b|proxy", re.IGNORECASE)
#: Ray's own lines of a job's log, before what the command prints.
_RAYS = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\tINFO |Running entrypoint for job ")
#: Time for a new or busy head node's agent to accept jobs; Ray itself gives up after 10 s.
_AGENT_PATIENCE_S = 120.0
_NO_AGENT_YET = re.compile(r"No available agent to submit job|Failed to get head node agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run to submit; ``grid`` is inside ``working_dir``, ``results`` on the cluster."""

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
        """The command that the cluster runs; SubmitError if the grid is not in ``working_dir``."""
        grid = name_there(self.grid, self.working_dir)
        # exec: if the head dies, Ray kills only the job's shell, not the shell's children.
        command = ["exec", "python", "-m", "orchestrator", "run", grid, "--run", self.run]
        command += ["--results", self.results] if self.results is not None else []
        command += ["--priority", str(self.priority)] if self.priority else []
        return shlex.join([*command, *self.arguments])

    @property
    def metadata(self) -> dict[str, str]:
        """Job metadata, for the queue of runs and for finding results."""
        kinds = sorted({job.accelerator.value for job in self.jobs})
        known = {
            MADE_BY: "nightgrid",
            RUN: self.run,
            RESULTS: self.results or os.environ.get(RESULTS_VARIABLE, ""),
            PRIORITY: str(self.priority),
            SUBMITTER: submitter(),
        }
        return known | ({KINDS: ",".join(kinds)} if kinds else {})

    def upload(self) -> Upload:
        """The files to upload; SubmitError if one is refused (``upload_of``)."""
        return upload_of(self.grid, self.jobs, self.working_dir, self.include)

    def runtime_env(self, directory: Path) -> dict[str, Any]:
        """The runtime environment: ``directory`` to upload, and variables."""
        commit, dirty = git_state()
        variables = {
            "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S),
            "PYTHONUNBUFFERED": "1",
            SUBMITTER_VARIABLE: submitter(),
            GIT_COMMIT_VARIABLE: commit,
            GIT_DIRTY_VARIABLE: None if dirty is None else str(int(dirty)),
            RESULTS_VARIABLE: os.environ.get(RESULTS_VARIABLE),
        }
        known = {name: value for name, value in variables.items() if value}
        return {"working_dir": str(directory), "env_vars": known}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as the cluster knows it. Times are seconds since the epoch."""

    run: str = ""  # its name, where Nightgrid sent it
    results: str = ""  # directory on the cluster, where one was named
    submitter: str = ""  # user@host
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


class NoAnswer(SubmitError):
    """Nothing listens at the address: no head runs there, or it cannot be reached from here."""


class HeadJobFailed(SubmitError):
    """A command that ran on the head has failed; the message is its own."""


class JobServer:
    """The job server of a cluster; raises SubmitError if none answers at the address."""

    def __init__(self, address: str | None) -> None:
        self.address = resolve_job_address(address)
        bypass_proxies(urlsplit(self.address).hostname or "")
        take_own_token()
        token, missing = own_token()
        if missing:
            raise SubmitError(missing)
        try:
            self.client = JobClient(self.address, token)
        except Exception as error:
            if asks_for_token(error) and _RAYS_REFUSAL.search(str(error)):
                raise SubmitError(token_advice(f"the cluster at {self.address}")) from error
            text = f"{self.address} does not answer as a Ray job server: {error_line(error)}"
            if asks_for_token(error) or _OF_A_GATEWAY.search(str(error)):
                text += (
                    ". This answer is not Ray's: a proxy or gateway stands before that address; "
                    "use the head's own port 8265 or an SSH tunnel to it"
                )
            raise SubmitError(text) from error

    def submit(self, submission: Submission) -> bool:
        """Submit a grid; return False if a job of this id and command exists.

        Raises SubmitError if the id belongs to another command, or the cluster refuses.
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
                try:  # a concurrent submission, or this one arrived after all
                    earlier = self._find(submission.submission_id)
                except OSError:
                    raise SubmitError(f"{self.address} went away: {error_line(error)}") from error
                if earlier is None:
                    message = f"{self.address} refuses the job: {error_line(error)}"
                    raise SubmitError(message) from error
        if earlier.entrypoint != entrypoint:
            raise SubmitError(
                f"job {submission.submission_id} is there already ({earlier.status}) with another "
                f"command:\n    {earlier.entrypoint}\nChoose another --submission-id."
            )
        return False

    def ask(
        self,
        arguments: Sequence[str],
        *,
        results: str = "",
        timeout_s: float = ANSWER_S,
        module: str = "orchestrator",
        may_fail: bool = False,
        files: Mapping[str, Path] | None = None,
    ) -> str:
        """Run a command (or another module) as a head job with these files, and return what it
        prints; ``results`` is a directory on the head, empty for the default.

        Raises HeadJobFailed if the command fails, unless it ``may_fail``; SubmitError if the
        cluster refuses, or after ``timeout_s``, when the job is stopped.
        """
        arguments = [*arguments, *(["--results", results] if results else [])]
        command = " ".join((module, *arguments[:1]))
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
            deadline = time.monotonic() + timeout_s
            while not (job := self.job(name)).over:
                if time.monotonic() > deadline:
                    message = f"{self.address}: `{command}` had not ended after {timeout_s:.0f} s"
                    raise SubmitError(message)
                time.sleep(0.5)
            lines = self.logs(name).splitlines()
        finally:
            self._forget(name)
        printed = "\n".join(line for line in lines if not _RAYS.match(line)).strip()
        if job.status != "SUCCEEDED" and not may_fail:
            refusal = printed.partition(f"nightgrid {' '.join(arguments[:1])}: ")[2] or printed
            reason = refusal[-500:] or job.message or f"`{command}` ended as {job.status}"
            raise HeadJobFailed(f"{self.address}: {reason}")
        return printed

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this program by a head job; arguments and result are JSON values."""
        with private_directory() as directory:
            file = directory / _CALL
            call = (function.__module__, function.__name__, arguments)
            file.write_text(json.dumps(call), encoding="utf-8")
            return self.json_in(self.ask((_CALL,), module=__name__, files={_CALL: file}))

    def answer(self, arguments: Sequence[str], results: str = "") -> Any:
        """Return the JSON that a command prints there; raises as ``ask``."""
        return self.json_in(self.ask([*arguments, "--json"], results=results))

    def json_in(self, printed: str) -> Any:
        """The JSON value in what a head job has printed; SubmitError, with its end, if none."""
        for start in re.finditer(r"^(?=[{\[])", printed, re.MULTILINE):
            with contextlib.suppress(ValueError):
                return json.JSONDecoder().raw_decode(printed, start.start())[0]
        raise SubmitError(f"{self.address}: {printed[-500:] or 'no answer'}")

    def _forget(self, name: str) -> None:
        """End and delete a head job, best-effort."""
        with contextlib.suppress(Exception):
            if not self.job(name).over:
                self.client.stop_job(name)
            deadline = time.monotonic() + _HELPER_END_S
            while not self.job(name).over and time.monotonic() < deadline:
                time.sleep(0.2)
            self.client.delete_job(name)

    def stop(self, submission_id: str) -> None:
        """Have Ray stop a job gracefully, and kill it after two minutes."""
        self.client.stop_job(self.job(submission_id).submission_id)

    def _send(self, **job: Any) -> str:
        """Submit a job, as soon as the head node's agent is there."""
        deadline = time.monotonic() + _AGENT_PATIENCE_S
        while True:
            try:
                return self.client.submit_job(**job)
            except RuntimeError as error:
                if not _NO_AGENT_YET.search(str(error)) or time.monotonic() > deadline:
                    raise
            time.sleep(1.0)

    def job(self, submission_id: str) -> JobInfo:
        """Return a job; SubmitError, with the newest ids, if there is none of this id."""
        info = self._find(submission_id)
        if info is None:
            known = ", ".join(job.submission_id for job in self.jobs()[:5]) or "none"
            message = f"no job '{submission_id}' at {self.address}; the newest there: {known}"
            raise SubmitError(message)
        return info

    def sent(self, run: str) -> JobInfo | None:
        """The job of this submission id, else the newest of this run name, one's own before those
        of others, else None."""
        jobs = self.jobs()
        by_id = [job for job in jobs if job.submission_id == run]
        named = [job for job in jobs if job.run == run]
        own = [job for job in named if job.submitter == submitter()]
        return next(iter(by_id or own or named), None)

    def jobs(self) -> list[JobInfo]:
        """Every submitted job that Nightgrid made, the newest first."""
        listed = [job for job in self.client.list_jobs() if job["submission_id"]]
        made_here = [j for j in listed if (j.get("metadata") or {}).get(MADE_BY) == "nightgrid"]
        made_here.sort(key=lambda job: job["start_time"] or 0, reverse=True)
        return list(map(_info, made_here))

    def logs(self, submission_id: str) -> str:
        """All that the job has printed so far."""
        self.job(submission_id)
        return self.client.get_job_logs(submission_id)

    def follow(self, submission_id: str, write: Callable[[str], object]) -> JobInfo:
        """Stream the job's output from its start to its end, reconnecting where needed.

        Raises SubmitError if there is no such job, or the cluster is unreachable for a minute.
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
        """Write the output after the first ``seen`` characters; return its length."""
        position = 0
        async for chunk in self.client.tail_job_logs(submission_id):
            start = max(0, seen - position)
            position += len(chunk)
            if start < len(chunk):
                write(chunk[start:])
        return max(0, position - seen)

    def _find(self, submission_id: str) -> JobInfo | None:
        try:
            return _info(self.client.get_job_info(submission_id))
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise SubmitError(f"{self.address}: {error_line(error)}") from error


def owner_of(jobs: Iterable[JobInfo], run: str, results: str) -> str:
    """The submitter of a run in a results directory of the cluster, by its newest job that was not
    refused (``JobServer.jobs``); empty if there is none."""
    for job in jobs:
        if (job.run, job.results) == (run, results) and job.exit_code not in _REFUSED:
            return job.submitter
    return ""


# ---------------------------------------------------------------- head jobs


def directory_there(results: str | None, job: JobInfo | None) -> str:
    """The named results directory on the head, else the job's; empty for the default."""
    directory = results or (job.results if job is not None else "")
    return "" if is_address(directory) else directory


def nodes_at(address: str) -> list[Node]:
    """Nodes with cards of the cluster at a GCS or job server address.

    Raises ClusterError if it cannot be joined, SubmitError if the job server fails.
    """
    if not is_job_address(address):
        with connect(address) as cluster:
            return list(described(cluster.nodes()))
    nodes = []
    for values in JobServer(address).call(nodes_here):
        packages = values["packages"]
        converted = {
            "accelerator": Accelerator(values["accelerator"]),
            "card_indices": tuple(values["card_indices"]),
            "packages": packages and tuple((name, version) for name, version in packages),
            "faults": tuple(values["faults"]),
        }
        nodes.append(Node(**{**values, **converted}))
    return nodes


def nodes_here() -> list[dict[str, Any]]:
    """Nodes with cards of the cluster that this process is in, as JSON values."""
    with connect() as cluster:  # Ray names it to its jobs, wherever its files are
        return [dataclasses.asdict(node) for node in described(cluster.nodes())]


def main(file: str) -> int:
    """Make the call in a file, as ``JobServer.call`` has written it, and print its result."""
    module, name, arguments = json.loads(Path(file).read_text(encoding="utf-8"))
    output.say_json(getattr(importlib.import_module(module), name)(*arguments))
    return 0


# ---------------------------------------------------------------- the job server's address


def is_job_address(address: str | None) -> bool:
    """Return whether this, or else the environment, names a job server and not a GCS."""
    known = address or next(filter(None, map(os.environ.get, ADDRESS_VARIABLES)), "")
    return known.startswith(("http://", "https://"))


def resolve_job_address(address: str | None) -> str:
    """URL of a listening job server, from ``--address`` or the environment; else SubmitError."""
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
        raise NoAnswer(
            f"nothing answers at {parts.hostname}:{port}: {error}. Is the head node up "
            "(`ray start --head`), its dashboard reachable from here (it listens on its own "
            "loopback unless given --dashboard-host), or an SSH tunnel needed?"
        ) from error
    return chosen if parts.port or parts.scheme == "https" else f"{chosen.rstrip('/')}:{port}"


def new_submission_id(run: str) -> str:
    """A fresh id: the run's name, the time, and four random digits."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"nightgrid-{run}-{stamp}-{os.urandom(2).hex()}"


def _info(job: Mapping[str, Any]) -> JobInfo:
    metadata = job.get("metadata") or {}
    started, ended = job.get("start_time"), job.get("end_time")  # milliseconds
    return JobInfo(
        submission_id=job["submission_id"],
        status=job["status"],
        entrypoint=job["entrypoint"],
        message=job.get("message") or "",
        started_at=started / 1000 if started else None,
        ended_at=ended / 1000 if ended else None,
        exit_code=job.get("driver_exit_code"),
        run=str(metadata.get(RUN, "")),
        results=str(metadata.get(RESULTS, "")),
        submitter=str(metadata.get(SUBMITTER, "")),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
