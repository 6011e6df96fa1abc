"""What Nightgrid runs inside Ray's processes: an agent per node, an actor per card.

A ``CardActor`` holds its card in Ray's accounts and gives it a name in the dashboard; the work is
done by a process beneath it (``card_process.py``) which can crash, hang and be replaced in a
fraction of a second while the actor stays. A ``NodeAgent`` starts those processes. A ``CardProbe``
holds all cards of a node for a moment to learn their indices. They are plain classes, which
``ray_claims.py`` turns into actors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.attempt import Attempt, RankOutcome, WorkerInfo
from orchestrator.card_sampler import CardSampler
from orchestrator.energy import Energy
from orchestrator.errors import ClusterError
from orchestrator.executor import Progress
from orchestrator.failure import Failure
from orchestrator.worker.card_process import CardProcess, Launch
from orchestrator.worker.leftovers import Owner, end_leftovers
from orchestrator.worker.process_server import end_process, wait_for_end
from workloads.devices import device_class, environment_for
from workloads.devices.telemetry import CardTelemetry

#: Threads of each worker of a node, in the environment in which its Ray was started.
THREADS = "NIGHTGRID_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What the agent of a node found."""

    hostname: str
    address: str  # by which other nodes reach it
    cores: int  # physical ones that this host gives us
    threads: int  # each worker's share of them, at least 1, or what THREADS asks for
    version: str  # of Nightgrid there
    server: str  # socket of the process server
    log_dir: str
    scratch: str = ""  # a directory for what the processes of this node share, as long as Ray runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReply:
    """How a rank ended, and whether its process went with it."""

    outcome: RankOutcome
    process_gone: bool


class NodeAgent:
    """Owns a node's process server; when the agent goes, every worker of the node goes."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._path = ""
        self._sampler: CardSampler | None = None

    def serve(
        self, address: str, preload: Sequence[str], cards_on_host: int, log_dir: str | None
    ) -> HostFacts:
        """Start the process server. It listens at once and forks once ``preload`` is imported.

        Raises:
            TimeoutError: a process of an earlier driver of the run does not end, and may hold a
                card.
        """
        owner = Owner.of_this_process()
        if owner is not None:
            for each in end_leftovers(owner):
                print(f"ended, of an earlier driver: {each.pid} {each.command}", flush=True)
        session_logs = _ray_log_dir()
        logs = Path(log_dir) if log_dir else session_logs
        logs.mkdir(parents=True, exist_ok=True)
        cores = physical_cores()
        path = self._path = f"{_socket_dir(session_logs.parent)}/s"
        # OpenMP reads its variable when torch is imported, which may be in the server.
        threads = threads_asked() or max(1, cores // cards_on_host)
        environment = os.environ | environment_for("cpu", 0, threads=threads)
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        log_name = f"process-server-{socket.gethostname()}-{os.getpid()}.log"
        with (logs / log_name).open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.worker.process_server", path, *preload],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
            )
        _wait_for(path, self._server, str(logs / log_name))
        return HostFacts(
            hostname=socket.gethostname(),
            address=address,
            cores=cores,
            threads=threads,
            version=__version__,
            server=path,
            log_dir=str(logs),
            scratch=str(session_logs.parent),
        )

    def watch(self) -> None:
        """Returns when the process server is gone; until then the call is outstanding."""
        if self._server is not None:
            self._server.wait()
            wait_for_end(self._path)

    def watch_cards(self, device: str) -> None:
        """Read this node's cards from now on, through the tools of their device."""
        self._sampler = CardSampler(device_class(device).telemetry)
        self._sampler.start()

    def telemetry(self) -> Mapping[int, CardTelemetry]:
        """What the cards of this host said last, by index."""
        return self._sampler.latest() if self._sampler is not None else {}

    def energy(self, index: int, start: float, end: float) -> Energy | None:
        """What a card took between two moments of this host's clock; None where unknown."""
        return self._sampler.energy(index, start, end) if self._sampler is not None else None

    def end(self, worker_id: str) -> None:
        """End a worker process whose actor died; returns when it and its children are gone."""
        with contextlib.suppress(OSError):  # the server is gone, and they with it
            end_process(self._path, worker_id)

    def close(self) -> None:
        """Kill every worker of the node and the server; returns when they are gone."""
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(10)


class CardProbe:
    """Holds every card of a node that Ray will give us."""

    def indices(self, kind: str) -> tuple[str, ...]:
        """The indices, as Ray words them, of the cards of ``kind`` that this actor holds."""
        import ray

        return tuple(ray.get_runtime_context().get_accelerator_ids().get(kind, ()))


class CardActor:
    """One card: at most one worker process at a time."""

    def __init__(self) -> None:
        self._process: CardProcess | None = None

    def start(self, launch: Launch) -> WorkerInfo | Failure:
        """Start a worker process; a Failure when it cannot start, and then it is gone."""
        self._process = CardProcess(launch)
        return self._process.start()

    def listen(self, address: str) -> Any:
        """Have rank 0 open a rendezvous: it, or a Failure."""
        assert self._process is not None
        return self._process.listen(address)

    def run(self, attempt: Attempt, rank: int, rendezvous: Any = None) -> RankReply:
        """Run one rank of an attempt, whatever becomes of its process."""
        assert self._process is not None
        outcome = self._process.run(attempt, rank, rendezvous)
        return RankReply(outcome=outcome, process_gone=self._process.gone)

    def progress(self) -> Progress | None:
        """What the process does; answered while ``run`` is busy."""
        return self._process.progress() if self._process is not None else None

    def stop(self, reason: str) -> None:
        """Kill the worker process; returns when it and its children are gone."""
        if self._process is not None:
            self._process.stop(reason)


def threads_asked() -> int | None:
    """OpenMP threads of a worker that the environment asks for; None: a share of the cores.

    Raises:
        ClusterError: it is no whole number above 0.
    """
    told = os.environ.get(THREADS, "")
    if not told:
        return None
    if not told.isdecimal() or int(told) < 1:
        raise ClusterError(
            f"{THREADS}={told!r} is no number of threads; give a whole number from 1 up, or unset "
            "it for an even share of the cores"
        )
    return int(told)


def physical_cores() -> int:
    """Physical cores this process may use, at least 1."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    physical = psutil.cpu_count(logical=False) or allowed or 1
    return max(1, min(physical, allowed or physical))


def _ray_log_dir() -> Path:
    """Where Ray keeps the logs of this node: this very process's output goes there."""
    output = Path(os.readlink("/proc/self/fd/1")) if os.path.exists("/proc/self/fd/1") else Path()
    if output.is_file():
        return output.parent
    return Path(tempfile.mkdtemp(prefix="nightgrid-logs-"))


def _socket_dir(session: Path) -> str:
    """A directory for this user alone. In Ray's session, which goes away with the node, unless
    the path gets too long for a socket (107 characters)."""
    base = session / "sockets"
    fits = base.is_dir() and len(str(base)) < 90
    return tempfile.mkdtemp(prefix="ng", dir=base if fits else "/tmp")


def _wait_for(path: str, server: subprocess.Popen[bytes], log: str) -> None:
    """Wait until the server listens.

    Raises:
        RuntimeError: it ended instead; the message has the end of its log.
    """
    from orchestrator.worker.card_process import tail_of

    while not os.path.exists(path):
        if server.poll() is not None:
            raise RuntimeError(f"the process server ended at once: {tail_of(log)}")
        time.sleep(0.02)
