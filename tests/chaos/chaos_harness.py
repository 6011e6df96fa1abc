"""A night in small: drivers on a real cluster, faults by a plan, and what the table says after.

Everything is done as a user would: `nightgrid run` in a process of its own, the same command
with ``--resume`` after its death, the rows read back through the store.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_invariants
from chaos_clock import SteppedClock
from chaos_cluster import ROOT, ChaosCluster, left_behind
from chaos_drivers import RUN, Drivers
from chaos_faults import Injector, flip_a_bit
from chaos_files import Canaries, FileFaults
from chaos_invariants import OF_CLUSTER
from chaos_plan import ALL_AT_ONCE, KINDS, ON_A_FULL_DISK, ROT, Fault, counts
from small_disks import disk_of, fill

from orchestrator.core.measurement import Measurement
from orchestrator.store.reader import about_how_many, row_files
from orchestrator.store.store import Store

sys.path.insert(0, str(ROOT / "tests" / "ray"))  # whose fake worker the chaos worker extends

_MEMORY_EVERY_S = 30.0
_BETWEEN_FAULTS_S = 2.0
FULL_BEFORE_KILL_S = 4.0  # so that some rows are pending
_ENDED = (0, 10)  # exit codes of a run that came to its end
_HEAD_AWAY_S = 120.0  # for which a fault may take the head away
_MOST_DEATHS = 20  # of drivers by themselves, after which a night is broken off


@dataclass(slots=True, kw_only=True)
class Night:
    """One run of a grid under faults. ``results`` and ``log_dir`` may be small disks; ``aside`` is
    a directory for copies of the run and for what nothing may touch."""

    cluster: ChaosCluster
    grid: Path
    results: Path
    log_dir: Path
    aside: Path
    seed: int
    clock: SteppedClock | None = None
    say: Callable[[str], None] = lambda _: None
    drivers: Drivers = field(init=False)
    injector: Injector = field(init=False)
    files: FileFaults = field(init=False)
    canaries: Canaries = field(init=False)
    rotten: list[str] = field(default_factory=list)  # job-attempt whose file rotted
    peak_memory_bytes: int = 0
    refused_without_head: int = 0  # drivers that came while a fault had taken the head away
    refused_for_room: int = 0  # drivers that met a full disk before anything was started
    died: int = 0  # drivers that ended by themselves, before their time
    not_injected: list[str] = field(default_factory=list)  # there was nothing to hit
    began: float = 0.0
    ended: float = 0.0
    exit_code: int | None = None
    problems: list[str] = field(default_factory=list)  # found while it ran

    def __post_init__(self) -> None:
        self.aside.mkdir(exist_ok=True)
        self.cluster.log_dir = self.log_dir
        self.canaries = Canaries(self.aside / "outside")
        self.drivers = Drivers(
            cluster=self.cluster,
            grid=self.grid,
            results=self.results,
            log_dir=self.log_dir,
            clock=self.clock,
        )
        self.injector = Injector(
            cluster=self.cluster,
            drivers=self.drivers,
            run=self.drivers.run,
            random=random.Random(self.seed),
        )
        self.files = FileFaults(
            drivers=self.drivers,
            injector=self.injector,
            canaries=self.canaries,
            copies=self.aside / "copies",
            random=random.Random(self.seed + 1),
        )
        self.injector.more = {
            **self.files.acts(),
            "kill the driver": lambda: self._kill_the_driver("kill the driver"),
            ON_A_FULL_DISK: lambda: self._kill_the_driver(ON_A_FULL_DISK),
            ALL_AT_ONCE: self._kill_all_of_the_run,
            "kill the driver under its supervisor": self._kill_the_child,
        }

    @property
    def store(self) -> Store:
        return Store.existing(self.results, RUN)

    def drive(
        self, faults: Sequence[tuple[float, str]], *, limit_s: float, faults_until_s: float
    ) -> None:
        """Run to the end, whatever is done to it meanwhile. Each fault is injected when it is due,
        or as soon as there is something that it can hit, until ``faults_until_s``; then jobs that
        work are told to be quick.

        Raises:
            AssertionError: the limit passed, or drivers kept ending by themselves.
        """
        self.began = time.time()
        self.drivers.start()
        start = self._work_has_begun(limit_s)
        waiting, next_memory, next_fault = sorted(faults), start, start
        while (code := self.drivers.process.poll()) is None or self._goes_on_after(code):
            now = time.monotonic() - start
            assert now < limit_s, f"not at its end after {limit_s} s: {self.drivers.tail()}"
            self.injector.due()
            if time.monotonic() >= next_memory:
                next_memory = time.monotonic() + _MEMORY_EVERY_S
                self.peak_memory_bytes = max(self.peak_memory_bytes, self.cluster.memory_bytes())
                self._tell_progress(now, waiting)
            if waiting and now > faults_until_s:
                self.not_injected += [kind for _, kind in waiting]
                waiting = []
            if not waiting:
                self.cluster.hurry()
            if time.monotonic() < next_fault or not self._inject_one(waiting, now):
                time.sleep(0.5)
                continue
            next_fault = time.monotonic() + _BETWEEN_FAULTS_S
        self.injector.settle()
        self.not_injected += [kind for _, kind in waiting]
        self.ended = time.time()
        self.exit_code = code
        assert code in _ENDED, f"exit code {code}: {self.drivers.tail()}"

    def check(self, *, jobs: int) -> dict[str, Any]:
        """All that must hold after the end, as a list of what does not (``problems``), with the
        figures."""
        figures = self.figures()
        contents = self.store.read()
        faults = self.injector.faults
        rows = chaos_invariants.with_true_times(contents.measurements, faults)
        wanted = self._job_ids()
        problems = [*self.problems, *self.files.problems]
        if len(wanted) != jobs:
            problems.append(f"the grid has {len(wanted)} jobs, not {jobs}")
        gone = chaos_invariants.lost(rows, wanted)
        twice = chaos_invariants.duplicated(rows)
        problems += [f"lost: {job}" for job in gone]
        problems += [f"duplicated: {what}" for what in twice]
        problems += chaos_invariants.wrong_ends(rows, faults)
        problems += chaos_invariants.unexplained(rows, faults)
        problems += [f"{f.node}: {f.note}" for f in faults if f.note.startswith("left running")]
        named = " ".join(damage.path.name for damage in contents.damaged)
        problems += [f"not named as damaged: {name}" for name in self.rotten if name not in named]
        left = left_behind(self.cluster)
        problems += left + self.canaries.harmed()
        told = "".join(path.read_text(errors="replace") for path in self.drivers.outputs)
        coloured = [line for line in told.splitlines() if "\x1b" in line]
        problems += ["a traceback in a driver's log"] * ("Traceback (most recent" in told)
        recovery = chaos_invariants.recovery_s(rows, faults)
        return figures | {
            "problems": problems,
            "jobs": len(wanted),
            "attempts": sum(1 for row in rows if row.started_at is not None),
            "attempts_lost": sum(1 for row in rows if row.started_at and row.state == "LOST"),
            "coloured_lines": coloured[:3],  # Ray's, in drivers' logs: told, not held against us
            "rows": len(rows),
            "rows_lost": len(gone),
            "rows_duplicated": len(twice),
            "files_rotted": len(self.rotten),
            "files_set_aside": len(contents.damaged),
            "left_behind": len(left),
            "recovery_s": {kind: _median_and_max(times) for kind, times in recovery.items()},
            "states": _states(rows),
        }

    def figures(self) -> dict[str, Any]:
        faults = self.injector.faults
        return {
            "seed": self.seed,
            "wall_s": round((self.ended or time.time()) - self.began, 1),
            "drivers": len(self.drivers.outputs),
            "drivers_refused_for_room": self.refused_for_room,
            "drivers_refused_without_head": self.refused_without_head,
            "drivers_that_died": self.died,
            "rivals_refused": self.files.refused,
            "faults": counts(fault.kind for fault in faults),
            "faults_total": len(faults),
            "not_injected": sorted(self.not_injected),
            "peak_memory_mib": self.peak_memory_bytes >> 20,
        }

    # ------------------------------------------------------------ while it runs

    def _inject_one(self, waiting: list[tuple[float, str]], now: float) -> bool:
        for number, (at, kind) in enumerate(waiting):
            if at > now:
                return False
            fault = self.injector.inject(kind)
            if fault is not None:
                del waiting[number]
                self.say(f"{now:6.0f} s  {_told(fault)}")
                return True
        return False

    def _tell_progress(self, now: float, waiting: Sequence[tuple[float, str]]) -> None:
        rows = about_how_many(row_files(self.drivers.run / "rows"))
        calm = "" if self.injector.is_calm else ", cluster not whole"
        self.say(
            f"{now:6.0f} s  -- about {rows} rows, {len(self.injector.faults)} faults, "
            f"{len(waiting)} to come, {len(self.injector.busy_workers())} workers busy{calm}"
        )

    def _work_has_begun(self, limit_s: float) -> float:
        deadline = time.monotonic() + limit_s
        while not self.injector.busy_workers():
            ended = self.drivers.process.poll() is not None
            assert not ended and time.monotonic() < deadline, self.drivers.tail()
            time.sleep(0.5)
        return time.monotonic()

    def _goes_on_after(self, code: int) -> bool:
        """Start the next driver if the last one ended before its time: for want of room, as it
        should, or of itself, which is held against it. Whether it did."""
        if self.drivers.had_no_room():
            self.refused_for_room += 1
        elif self.drivers.had_no_head() and self._head_went_lately():
            self.refused_without_head += 1
        elif code in _ENDED or self.died >= _MOST_DEATHS:
            return False
        else:
            self.died += 1
            why = self.drivers.tail()[-600:]
            self.problems.append(f"a driver ended by itself, exit code {code}: {why}")
            self.say(f"        a driver ended by itself: {code}")
        self.injector.settle()
        self.drivers.start("--resume")
        return True

    def _head_went_lately(self) -> bool:
        since = time.time() - _HEAD_AWAY_S
        faults = self.injector.faults
        return any(fault.kind in OF_CLUSTER and fault.at > since for fault in faults)

    def _kill_the_driver(self, kind: str) -> Fault | None:
        """``kill -9``, at any moment or while rows are pending on a full disk; a file rots; with
        room again, the same command resumes."""
        full = disk_of(self.drivers.run) if kind == ON_A_FULL_DISK else None
        unfit = kind == ON_A_FULL_DISK and full is None
        if unfit or not self._may_kill():
            return None
        filler = fill(full) if full is not None else None
        if filler is not None:
            time.sleep(FULL_BEFORE_KILL_S)
        fault = Fault(kind=kind, at=time.time())
        fault.pid = self.drivers.kill()
        if filler is not None:
            filler.unlink(missing_ok=True)
        flipped = flip_a_bit(self.drivers.run / "rows", self.injector.random)
        if flipped is not None:
            self.rotten.append(flipped[1])
            self.injector.faults.append(Fault(kind=ROT, at=time.time(), note=flipped[1]))
        self.drivers.start("--resume")
        return fault

    def _kill_all_of_the_run(self) -> Fault | None:
        first = self._kill_the_driver("kill the driver")
        if first is None:
            return None
        self.injector.faults.append(first)
        time.sleep(self.injector.random.uniform(0.0, 1.0))
        fault = Fault(kind=ALL_AT_ONCE, at=time.time())
        self.injector.kill_all_of_nodes()
        fault.pid = self.drivers.kill()
        self.drivers.start("--resume")
        return fault

    def _kill_the_child(self) -> Fault | None:
        pid = self.drivers.kill_child() if self._may_kill() else None
        if pid is None:
            return None
        return Fault(kind="kill the driver under its supervisor", at=time.time(), pid=pid)

    def _may_kill(self) -> bool:
        """Return whether all is there, no disk is full, and the driver is neither halted nor has
        another time of day: on a full disk nobody starts a driver."""
        lasting = ("fill the disk", "fill the log's disk", "freeze the driver", "step the clock")
        return self.injector.is_calm and not self.injector.lasts(*lasting)

    # ------------------------------------------------------------ after

    def _job_ids(self) -> list[str]:
        from chaos_worker import register

        from orchestrator.grid.parser import load_grid
        from workloads import registry

        before = registry.WORKLOADS  # of a process in which other tests run, too
        register()
        try:
            return [job.job_id for job in load_grid(self.grid).jobs()]
        finally:
            registry.WORKLOADS = before


def missing(figures: dict[str, Any], least: int, left_out: Sequence[str] = ()) -> list[str]:
    found = figures["faults"]
    wanted = [kind for kind in KINDS if kind not in left_out]
    wanted += [ROT] * ("kill the driver" in wanted)
    return [
        f"{found.get(kind, 0)} of {kind!r}, not {least}"
        for kind in wanted
        if found.get(kind, 0) < least
    ]


def _told(fault: Fault) -> str:
    where = fault.node + (f"/{fault.card}" if fault.card is not None else "")
    return " ".join(part for part in (fault.kind, where, fault.note) if part)


def _median_and_max(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "median": round(ordered[len(ordered) // 2], 1),
        "max": round(ordered[-1], 1),
    }


def _states(rows: Sequence[Measurement]) -> dict[str, int]:
    return dict(Counter(str(row.state) for row in chaos_invariants.standing(rows).values()))
