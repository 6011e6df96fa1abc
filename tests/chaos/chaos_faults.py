"""Faults: which, when and to whom, all decided by a seed; and what became of each.

A fault is chosen when it is due among what is there then, in an order that does not depend on
process ids, so that a seed gives the same faults again as far as a real machine can.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_cluster import ChaosCluster

#: What can be done to a run from outside, and how often it is chosen.
KINDS = {
    "kill a worker": 8,  # kill -9 while its job runs
    "segfault a worker": 3,
    "freeze a worker": 2,  # SIGSTOP: it says nothing more and ignores all but kill -9
    "kill a node's agent": 2,  # the Ray process above its workers
    "kill a process server": 1,  # and with it every worker of a node
    "kill a raylet": 2,  # with all of its node; the server comes back
    "fill the disk": 2,
    "start a second driver": 1,
}
#: How long a server that lost its power is away, and a disk full.
AWAY_S = 6.0
FULL_S = 8.0


@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault as it was injected."""

    kind: str
    at: float  # seconds since the epoch
    node: str = ""
    card: int | None = None
    pid: int | None = None  # of the worker process that it hit
    note: str = ""

    @property
    def hits_node(self) -> bool:
        """Whether all workers of the node die of it."""
        return self.kind in ("kill a raylet", "kill a process server", "kill a node's agent")


def plan(seed: int, seconds: float, every_s: float) -> list[tuple[float, str]]:
    """When to inject what: one fault about every ``every_s`` seconds, mixed by weight."""
    random_ = random.Random(seed)
    kinds, weights = zip(*KINDS.items(), strict=True)
    planned = []
    at = every_s
    while at < seconds:
        planned.append((at, random_.choices(kinds, weights)[0]))
        at += every_s * random_.uniform(0.6, 1.4)
    return planned


class Injector:
    """Injects faults into a running cluster and keeps the list of them."""

    def __init__(self, cluster: ChaosCluster, results: Path, seed: int) -> None:
        self.cluster = cluster
        self.results = results
        self.random = random.Random(seed)
        self.faults: list[Fault] = []
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._away: set[str] = set()

    def due(self) -> None:
        """Do what an earlier fault has left to be done: a server comes back, a disk is emptied."""
        now = time.monotonic()
        ready = [act for at, act in self._later if at <= now]
        self._later = [(at, act) for at, act in self._later if at > now]
        for act in ready:
            act()
        self.cluster.supervise()

    def settle(self) -> None:
        """Wait until all of it is done."""
        while self._later:
            time.sleep(0.2)
            self.due()

    def inject(self, kind: str) -> Fault | None:
        """Inject one; None if there is nothing now that it could hit."""
        act = {
            "kill a worker": lambda: self._signal_worker(kind, signal.SIGKILL),
            "segfault a worker": lambda: self._signal_worker(kind, signal.SIGSEGV),
            "freeze a worker": lambda: self._signal_worker(kind, signal.SIGSTOP),
            "kill a node's agent": lambda: self._kill_named(kind, "ray::NodeAgent"),
            "kill a process server": lambda: self._kill_named(kind, "process_server"),
            "kill a raylet": self._kill_raylet,
            "fill the disk": self._fill_disk,
        }[kind]
        fault = act()
        if fault is not None:
            self.faults.append(fault)
        return fault

    def note(self, kind: str, note: str = "") -> Fault:
        """Keep a fault that somebody else injects."""
        fault = Fault(kind=kind, at=time.time(), note=note)
        self.faults.append(fault)
        return fault

    # ------------------------------------------------------------ each kind

    def _signal_worker(self, kind: str, number: signal.Signals) -> Fault | None:
        busy = self.busy_workers()
        if not busy:
            return None
        node, card, pid = self.random.choice(busy)
        fault = Fault(kind=kind, at=time.time(), node=node, card=card, pid=pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return fault

    def busy_workers(self) -> list[tuple[str, int, int]]:
        """Node, card and process of every worker that runs a job which works. Those that go wrong
        of themselves are left alone: what they did would not be known from what was done. They are
        never in the phase with which one that works begins."""
        from orchestrator.run_status import RunStatus

        try:
            text = (self.results / "status.json").read_text()
            cards = RunStatus.from_json(text).cards
        except (OSError, ValueError):
            return []
        busy = {
            f"{card.card.replace('/', '-')}-{card.worker_id}.log"
            for card in cards
            if card.phase == "warmup"
        }
        found = []
        for log, pid in self.cluster.worker_processes():
            if log in busy and _is_group_leader(pid):
                node, _, rest = log.partition("-HPU")
                found.append((node, int(rest.split("-")[0]), pid))
        return found

    def _kill_named(self, kind: str, words: str) -> Fault | None:
        there = []
        for process in self.cluster.processes():
            with contextlib.suppress(Exception):
                title = f"{process.name()} {' '.join(process.cmdline())}"
                # Forked workers have the command line of their server and of its guardian.
                above = process.parents()[1:2]
                forked = above and words in " ".join(above[0].cmdline())
                if words in title and not forked:
                    there.append((self.cluster.node_of(process.pid), process.pid))
        there = sorted((node, pid) for node, pid in there if node)
        if not there:
            return None
        node, pid = self.random.choice(there)
        fault = Fault(kind=kind, at=time.time(), node=node)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return fault

    def _kill_raylet(self) -> Fault | None:
        there = [name for name in self.cluster.names if name not in self._away]
        if len(there) < 2:  # one server always stays
            return None
        name = self.random.choice(there)
        fault = Fault(kind="kill a raylet", at=time.time(), node=name)
        self.cluster.kill_raylet(name)
        self._away.add(name)

        def back() -> None:
            left = self.cluster.clear(name)
            fault.note = f"left running: {', '.join(left)}" if left else ""
            self.cluster.start(name)
            self._away.discard(name)

        self._later.append((time.monotonic() + AWAY_S, back))
        return fault

    def _fill_disk(self) -> Fault | None:
        disk = next((at for at in self.results.parents if os.path.ismount(at)), Path("/"))
        filler = disk / "filler"
        if filler.exists() or not _is_small(disk):
            return None
        fault = Fault(kind="fill the disk", at=time.time())
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 65536)
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0")

        self._later.append((time.monotonic() + FULL_S, lambda: filler.unlink(missing_ok=True)))
        return fault


def flip_a_bit(rows: Path, random_: random.Random) -> tuple[Path, str] | None:
    """Let one bit of one row's file rot; the file, and the job and attempt whose row it was."""
    files = sorted(path for path in rows.glob("*.parquet") if not path.name.startswith("compacted"))
    if not files:
        return None
    path = random_.choice(files)
    data = bytearray(path.read_bytes())
    position = random_.randrange(len(data))
    data[position] ^= 1 << random_.randrange(8)
    path.write_bytes(bytes(data))
    return path, path.name.rpartition("-")[0]


def by_kind(faults: Sequence[Fault]) -> dict[str, int]:
    """How many of each kind, the most frequent first."""
    counts: dict[str, int] = {}
    for fault in faults:
        counts[fault.kind] = counts.get(fault.kind, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _is_small(disk: Path) -> bool:
    """Whether a file system is one that may be filled: made for this, with a few MiB."""
    size = os.statvfs(disk)
    return size.f_blocks * size.f_frsize < 2**28


def _is_group_leader(pid: int) -> bool:
    """Whether it is the worker itself and not a child of one."""
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False
