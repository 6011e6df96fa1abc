"""Faults that hit processes and disks, and what became of each.

A fault is chosen when it is due among what is there then, in an order that does not depend on
process ids, so that a seed gives the same faults again as far as a real machine can.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from chaos_cluster import ChaosCluster
from chaos_plan import KINDS, Fault
from small_disks import FILLER, disk_of, fill

if TYPE_CHECKING:
    from chaos_drivers import Drivers

#: How long a server that lost its power is away, and a disk full.
AWAY_S = 6.0
FULL_S = 8.0
#: How long what is frozen stays so. Ray gives up a silent node after 15 s.
AGENT_FROZEN_S = 8.0
RAYLET_FROZEN_S = (6.0, 30.0)
CONTROL_STORE_FROZEN_S = 45.0
DRIVER_FROZEN_S = 20.0
STEPPED_S = 20.0
#: Raylets end themselves a minute after the head that they knew.
_ALL_ANEW_S = 75.0

AGENT = "ray::NodeAgent"
Act = Callable[[], "Fault | None"]


@dataclass(slots=True, kw_only=True)
class Injector:
    """Injects faults into a running cluster and keeps the list of them."""

    cluster: ChaosCluster
    drivers: Drivers
    run: Path  # directory of the run
    random: random.Random
    faults: list[Fault] = field(default_factory=list)
    more: Mapping[str, Act] = field(default_factory=dict)  # faults that others know how to inject
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _away: set[str] = field(default_factory=set)  # servers
    _outage: Fault | None = None  # of all the cluster, as long as it lasts

    def due(self) -> None:
        """Do what an earlier fault has left to be done: a server comes back, a disk is emptied."""
        now = time.monotonic()
        ready = [act for at, act in self._later if at <= now]
        self._later = [(at, act) for at, act in self._later if at > now]
        for act in ready:
            act()
        self.cluster.supervise()
        if self._outage is not None and self._is_over(self._outage):
            self._outage.until = time.time()
            self._outage = None

    def settle(self) -> None:
        while self._later or self._outage is not None:
            time.sleep(0.2)
            self.due()

    @property
    def is_calm(self) -> bool:
        """Return whether all of the cluster is there, as far as the faults so far go."""
        return self._outage is None and not self._away and self.cluster.is_whole

    def lasts(self, *kinds: str) -> bool:
        return any(fault.kind in kinds and fault.until is None for fault in self.faults)

    def inject(self, kind: str) -> Fault | None:
        """Inject one; None if there is nothing now that it could hit."""
        acts: Mapping[str, Act] = {
            "kill a worker": lambda: self._signal_worker(kind, signal.SIGKILL),
            "segfault a worker": lambda: self._signal_worker(kind, signal.SIGSEGV),
            "freeze a worker": lambda: self._signal_worker(kind, signal.SIGSTOP),
            "kill a node's agent": lambda: self._hit_named(kind, AGENT),
            "freeze a node's agent": lambda: self._hit_named(kind, AGENT, AGENT_FROZEN_S),
            "kill a spawner": lambda: self._hit_named(kind, "worker.spawn"),
            "kill a raylet": lambda: self._kill_raylet(kind),
            "freeze a raylet": lambda: self._freeze_raylet(kind),
            "fill the disk": lambda: self._fill(kind, self.run),
            "fill the log's disk": lambda: self._fill(kind, self.drivers.log_dir),
            "step the clock": lambda: self._step_clock(kind),
            "freeze the driver": lambda: self._freeze_driver(kind),
            **dict.fromkeys(
                (name for name in KINDS if KINDS[name].heavy), lambda: self._take_cluster_away(kind)
            ),
            **self.more,
        }
        fault = acts[kind]()
        if fault is not None:
            self.faults.append(fault)
        return fault

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def lasting(self, fault: Fault, seconds: float, undo: Callable[[], None]) -> Fault:
        """Have a fault end after so many seconds."""

        def end() -> None:
            undo()
            fault.until = time.time()

        self.after(seconds, end)
        return fault

    # ------------------------------------------------------------ workers

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
        from orchestrator.core.status import RunStatus

        try:
            text = (self.run / "status.json").read_text()
            cards = RunStatus.from_json(text).cards
        except (OSError, ValueError):
            return []
        busy = {
            f"{card.card.replace('/', '-')}-{card.worker_id}.log"
            for card in cards
            if card.phase == "warmup"
        }
        found = []
        for log, pid in self.cluster.worker_processes() if busy else ():
            if log in busy and _is_group_leader(pid):
                node, _, rest = log.partition("-HPU")
                found.append((node, int(rest.split("-")[0]), pid))
        return found

    # ------------------------------------------------------------ nodes

    def _named(self, words: str) -> list[tuple[str, int]]:
        """Node and process of every process of Ray or of ours with these words in its title."""
        there = []
        for process in self.cluster.processes():
            with contextlib.suppress(Exception):
                title = f"{process.name()} {' '.join(process.cmdline())}"
                # Forked workers have the command line of their spawner and of its reaper.
                above = process.parents()[1:2]
                forked = above and words in " ".join(above[0].cmdline())
                if words in title and not forked:
                    there.append((self.cluster.node_of(process.pid), process.pid))
        return sorted((node, pid) for node, pid in there if node)

    def kill_all_of_nodes(self) -> None:
        """``kill -9`` of every agent, spawner and worker."""
        named = [pid for words in (AGENT, "worker.spawn") for _, pid in self._named(words)]
        for pid in (*named, *(pid for _, pid in self.cluster.worker_processes())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _hit_named(self, kind: str, words: str, frozen_s: float | None = None) -> Fault | None:
        """Kill a process with these words in its title, or freeze it for a while."""
        there = self._named(words) if self._outage is None else []
        if not there:
            return None
        node, pid = self.random.choice(there)
        fault = Fault(kind=kind, at=time.time(), node=node)
        if frozen_s is not None:
            return self._freeze(fault, pid, frozen_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return fault

    def _server(self) -> str | None:
        """A server that may be taken away: one always stays."""
        there = [name for name in self.cluster.names if name not in self._away]
        if self._outage is not None or len(there) < 2 or not self.cluster.is_whole:
            return None
        return self.random.choice(there)

    def _kill_raylet(self, kind: str) -> Fault | None:
        name = self._server()
        if name is None:
            return None
        fault = Fault(kind=kind, at=time.time(), node=name)
        self.cluster.kill_raylet(name)
        self._away.add(name)

        def back() -> None:
            left = self.cluster.clear(name)
            fault.note = f"left running: {', '.join(left)}" if left else ""
            self.cluster.come_back(name)
            self._away.discard(name)

        self.after(AWAY_S, back)
        return fault

    def _freeze_raylet(self, kind: str) -> Fault | None:
        name = self._server()
        raylet = self.cluster.part(name, "raylet") if name is not None else None
        if name is None or raylet is None:
            return None
        seconds = self.random.choice(RAYLET_FROZEN_S)
        fault = Fault(kind=kind, at=time.time(), node=name, note=f"for {seconds:.0f} s")
        self._away.add(name)
        return self._freeze(fault, raylet.pid, seconds, lambda: self._away.discard(name))

    def _freeze(
        self, fault: Fault, pid: int, seconds: float, then: Callable[[], None] = lambda: None
    ) -> Fault:
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            then()

        return self.lasting(fault, seconds, go_on)

    # ------------------------------------------------------------ disks, the driver and its clock

    def _fill(self, kind: str, directory: Path) -> Fault | None:
        disk = disk_of(directory)
        if disk is None or (disk / FILLER).exists():
            return None
        fault = Fault(kind=kind, at=time.time())
        filler = fill(disk)
        return self.lasting(fault, FULL_S, lambda: filler.unlink(missing_ok=True))

    def _step_clock(self, kind: str) -> Fault | None:
        clock = self.drivers.clock
        if clock is None or self.lasts(kind):
            return None
        from chaos_clock import STEP_S

        offset = self.random.choice((STEP_S, -STEP_S))
        fault = Fault(kind=kind, at=time.time(), offset_s=offset, note=f"{offset:+d} s")
        clock.step(offset)
        return self.lasting(fault, STEPPED_S, lambda: clock.step(0))

    def _freeze_driver(self, kind: str) -> Fault | None:
        pid = self.drivers.working_pid()
        if pid is None:
            return None
        return self._freeze(Fault(kind=kind, at=time.time(), pid=pid), pid, DRIVER_FROZEN_S)

    # ------------------------------------------------------------ the whole cluster

    def _take_cluster_away(self, kind: str) -> Fault | None:
        gcs = self.cluster.part("head", "gcs_server") if self.is_calm else None
        if gcs is None:
            return None
        fault = self._outage = Fault(kind=kind, at=time.time())
        if kind == "freeze the control store":
            return self._freeze(fault, gcs.pid, CONTROL_STORE_FROZEN_S)
        if kind == "kill the control store":
            self.cluster.stay_away("head")
            gcs.kill()
            self.after(AWAY_S, lambda: self.cluster.come_back("head"))
        elif kind == "restart the head":
            self.cluster.end("head", signal.SIGTERM)
        else:
            for name in ("head", *self.cluster.names):
                self.cluster.end(name, signal.SIGKILL)
        return fault

    def _is_over(self, outage: Fault) -> bool:
        """Return whether all is there again, and nothing of before is left that is yet to end."""
        if outage.kind == "freeze the control store":
            return outage.until is not None
        lasted = time.time() - outage.at
        anew = all(started > outage.at for started in self.cluster.started_at.values())
        return self.cluster.is_whole and (anew or lasted > AWAY_S + _ALL_ANEW_S)


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


def _is_group_leader(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False
