"""A night in small: drivers on a real cluster, faults by a seed, and what the table says after.

Everything is done as a user would: `nightgrid run` in a process of its own, the same command
with ``--resume`` after its death, the rows read back through the store.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_invariants
from chaos_cluster import ROOT, ChaosCluster
from chaos_faults import Fault, Injector, by_kind, flip_a_bit

from orchestrator.measurement import Measurement
from orchestrator.results.store import Store

sys.path.insert(0, str(ROOT / "tests" / "ray"))  # whose fake worker the chaos worker extends

RUN = "night"
_MEMORY_EVERY_S = 30.0
_WAIT_FOR_TARGET_S = 60.0  # for something that a fault can hit
_ENDED = (0, 10)  # exit codes of a run that came to its end


@dataclass(slots=True, kw_only=True)
class Night:
    """One run of a grid under faults. ``results`` may be a small disk."""

    cluster: ChaosCluster
    grid: Path
    results: Path
    seed: int
    driver_deaths: Sequence[float] = ()  # seconds after the start of the first driver
    rot: bool = True  # whether a row's file rots while the driver is dead
    injector: Injector = field(init=False)
    rotten: list[str] = field(default_factory=list)  # job-attempt whose file rotted
    peak_memory_bytes: int = 0
    outputs: list[Path] = field(default_factory=list)
    drivers: int = 0
    rivals_refused: int = 0
    refused_for_room: int = 0  # drivers that met a full disk before anything was started
    began: float = 0.0
    ended: float = 0.0
    exit_code: int | None = None
    problems: list[str] = field(default_factory=list)  # found while it ran

    def __post_init__(self) -> None:
        self.injector = Injector(self.cluster, self.results / RUN, self.seed)

    @property
    def store(self) -> Store:
        """The run's rows."""
        return Store.existing(self.results, RUN)

    def drive(self, faults: Sequence[tuple[float, str]], limit_s: float) -> None:
        """Run to the end, whatever is done to it meanwhile.

        Raises:
            AssertionError: a driver ended by itself before the end, or the limit passed.
        """
        random_ = random.Random(self.seed)
        self.began = time.time()
        driver = self._start()
        start = self._work_has_begun(driver, limit_s)
        waiting = sorted([*faults, *((at, "kill the driver") for at in self.driver_deaths)])
        next_memory = start
        while (code := driver.poll()) is None or self._had_no_room(code):
            now = time.monotonic() - start
            if code is not None:
                self.injector.settle()
                self.refused_for_room += 1
                driver = self._start("--resume")
            assert now < limit_s, f"not at its end after {limit_s} s: {self._tail()}"
            self.injector.due()
            if time.monotonic() >= next_memory:
                next_memory = time.monotonic() + _MEMORY_EVERY_S
                self.peak_memory_bytes = max(self.peak_memory_bytes, self.cluster.memory_bytes())
            if not waiting or waiting[0][0] > now:
                time.sleep(0.2)
                continue
            at, kind = waiting[0]
            if kind == "kill the driver":
                del waiting[0]
                driver = self._kill_driver(driver, random_)
            elif kind == "start a second driver":
                del waiting[0]
                self._rival(driver)
            elif self.injector.inject(kind) is not None or now > at + _WAIT_FOR_TARGET_S:
                del waiting[0]
            else:
                time.sleep(0.5)  # nothing is there that it could hit: a moment later
        self.injector.settle()
        self.ended = time.time()
        self.exit_code = code
        assert code in _ENDED, f"exit code {code}: {self._tail()}"

    def check(self, *, jobs: int) -> dict[str, Any]:
        """All that must hold after the end, as a list of what does not (``problems``), with the
        figures."""
        contents = self.store.read()
        rows = contents.measurements
        faults = self.injector.faults
        wanted = self._job_ids()
        problems = list(self.problems)
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
        problems += self._left_behind()
        told = "".join(path.read_text(errors="replace") for path in self.outputs)
        coloured = [line for line in told.splitlines() if "\x1b" in line]
        problems += ["a traceback in a driver's log"] * ("Traceback (most recent" in told)
        recovery = chaos_invariants.recovery_s(rows, faults)
        return {
            "problems": problems,
            "seed": self.seed,
            "jobs": len(wanted),
            "attempts": sum(1 for row in rows if row.started_at is not None),
            "wall_s": round(self.ended - self.began, 1),
            "drivers": self.drivers,
            "drivers_refused_for_room": self.refused_for_room,
            "faults": by_kind(faults),
            "faults_total": len(faults),
            "coloured_lines": coloured[:3],  # Ray's, in drivers' logs: told, not held against us
            "rows": len(rows),
            "rows_lost": len(gone),
            "rows_duplicated": len(twice),
            "files_rotted": len(self.rotten),
            "files_set_aside": len(contents.damaged),
            "recovery_s": {kind: _median_and_max(times) for kind, times in recovery.items()},
            "states": _states(rows),
            "peak_memory_mib": self.peak_memory_bytes >> 20,
        }

    # ------------------------------------------------------------ drivers

    def _work_has_begun(self, driver: subprocess.Popen[bytes], limit_s: float) -> float:
        """Wait for the first busy worker, since faults hit work; the moment, as the clock of faults
        counts."""
        deadline = time.monotonic() + limit_s
        while not self.injector.busy_workers():
            assert driver.poll() is None and time.monotonic() < deadline, self._tail()
            time.sleep(0.5)
        return time.monotonic()

    def _command(self, *more: str) -> list[str]:
        return [
            *(sys.executable, str(ROOT / "tests" / "chaos" / "chaos_run.py"), "run"),
            *(str(self.grid), "--address", self.cluster.address),
            *("--results", str(self.results), "--run", RUN, *more),
        ]

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        self.drivers += 1
        output = Path(self.cluster.temp_dir) / f"driver-{self.drivers}.log"
        self.outputs.append(output)
        with output.open("wb") as file:
            return subprocess.Popen(
                self._command(*more),
                env=self.cluster.environment(),
                cwd=self.grid.parent,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill_driver(
        self, driver: subprocess.Popen[bytes], random_: random.Random
    ) -> subprocess.Popen[bytes]:
        """``kill -9``, at any moment; perhaps a file rots; the same command again resumes."""
        self.injector.note("kill the driver")
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        if self.rot:
            flipped = flip_a_bit(self.results / RUN / "rows", random_)
            if flipped is not None:
                self.rotten.append(flipped[1])
                self.injector.note("let a row's file rot", flipped[1])
        self.injector.settle()  # on a full disk nobody starts a driver
        return self._start("--resume")

    def _rival(self, driver: subprocess.Popen[bytes]) -> None:
        """A second driver must be refused at once, and told who holds the run."""
        fault = self.injector.note("start a second driver")
        try:
            done = subprocess.run(
                self._command(),
                env=self.cluster.environment(),
                cwd=self.grid.parent,
                capture_output=True,
                text=True,
                timeout=90,
            )
        except subprocess.TimeoutExpired:
            self.problems.append("a second driver was not refused in 90 s")
            return
        if driver.poll() is not None:
            return  # the first has just ended, so it was none too many
        if done.returncode == 4 and f"held by process {driver.pid} on " in done.stderr:
            self.rivals_refused += 1
            fault.note = "refused"
        else:
            self.problems.append(f"a second driver: {done.returncode}: {done.stderr[-500:]}")

    # ------------------------------------------------------------ after

    def _job_ids(self) -> list[str]:
        from chaos_worker import register

        from orchestrator.grid.model import load_grid
        from workloads import registry

        before = registry.WORKLOADS  # of a process in which other tests run, too
        register()
        try:
            return [job.job_id for job in load_grid(self.grid).jobs()]
        finally:
            registry.WORKLOADS = before

    def _left_behind(self) -> list[str]:
        """Processes on cards, and cards that are held, once the run is over."""
        deadline = time.monotonic() + 20
        while True:
            left = [f"left running: {log} ({pid})" for log, pid in self.cluster.worker_processes()]
            left += self._ours_still_there()
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        held = self.cluster.held_cards()
        return left + ([f"{held:g} cards are held"] if held else [])

    def _ours_still_there(self) -> list[str]:
        found = []
        for process in self.cluster.processes():
            with contextlib.suppress(Exception):
                title = " ".join(process.cmdline())
                if any(word in title for word in ("process_server", "NodeAgent", "SIG_IGN")):
                    found.append(f"left running: {title[:80]} ({process.pid})")
        return found

    def _had_no_room(self, code: int) -> bool:
        """Whether a driver was refused because the disk was full when it came, as it should be."""
        return code == 4 and "No space left on device" in self._tail() and not self._worked()

    def _worked(self) -> bool:
        return "starting on " in self.outputs[-1].read_text(errors="replace")

    def _tail(self) -> str:
        return self.outputs[-1].read_text(errors="replace")[-3000:]


def _median_and_max(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "median": round(ordered[len(ordered) // 2], 1),
        "max": round(ordered[-1], 1),
    }


def _states(rows: Sequence[Measurement]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in chaos_invariants.standing(rows).values():
        counts[str(row.state)] = counts.get(str(row.state), 0) + 1
    return counts


def injected(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """The faults as plain values, for a file."""
    return [
        {"at": f.at, "kind": f.kind, "node": f.node, "card": f.card, "pid": f.pid, "note": f.note}
        for f in faults
    ]
