"""Whole nights in virtual time: drivers that die and are resumed, over one store and one cluster.

A night is the real ``Driver`` and the real ``Schedule`` on a ``VirtualCluster``, with rows in the
real ``Store`` on a disk in memory, or in a simple store where many events are wanted. All that goes
wrong is drawn from one seed: a seed is a history, which replays exactly. What must hold is checked
at every step, against what was promised and what happened, never against the programme's own books.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from typing import Any
from unittest.mock import patch

from disk_model import NOWHERE, SimulatedDisk
from schedule_cases import Spread
from schedule_cases import job as job_of
from schedule_cases import node as node_of
from shapes import EPOCH_S, NOTICED_S, Broken, Died, Shape, Tally, is_late, must
from stores import DiskStore, MemoryStore, Promises

from clusters import NightCluster, NightExecutor
from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.errors import StoreFull, StoreLocked
from orchestrator.core.events import NodeJoined
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import Action, Plan, PlannedJob
from orchestrator.core.status import RunStatus
from orchestrator.core.topology import Card
from orchestrator.driver import loop as driver_module
from orchestrator.driver.board import PHASE_LIMITS_S, Board
from orchestrator.driver.loop import Driver
from orchestrator.driver.supervisor import StopSignal
from orchestrator.scheduler.invariants import InvariantViolated
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulated_faults import Chance, SimulationSettings
from orchestrator.store import disk as real_disk

#: Longest wait of a simulated driver for an event: a night has hours, whose seconds cost time here.
POLL_S = 60.0
_DISK_CALLS = (
    *("create", "create_new", "has_name", "write", "sync", "close", "rename", "remove", "read"),
    *("names", "is_there", "make_directory", "sync_directory", "may_be_ordinary"),
)


class Night:
    """The things that outlive a driver: time, cards, processes, the store, and what was promised of
    it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.random = Random(f"accidents {shape.seed}")
        self.now = 0.0
        self.tally = Tally(nights=1)
        self.jobs = list(self._jobs())
        self.nodes = [node_of(f"n{number}", shape.cards) for number in range(shape.nodes)]
        self.holder: int | None = None
        self.living: set[int] = set()
        self.processes: dict[Card, int] = {}  # which driver's
        self.unsafe: set[str] = set()  # ended attempts whose row is not safe
        self.waiting: set[str] = set()  # attempts whose rows found no room
        self.no_room = False  # as the driver was told last
        self.begun: set[str] = set()
        self.handed: list[Measurement] = []
        self.promised: dict[tuple[str, str], Measurement] = {}
        self.files: dict[tuple[str, str], str] = {}  # of promised rows, by the same keys
        self.journal: dict[str, Measurement] = {}  # in the store
        self.journalled: dict[str, list[Measurement]] = {}  # all that it ever got
        self.rowed: set[str] = set()  # attempts of which this driver has handed over a row
        self.flakiness = Random(f"flaky {shape.seed}")
        self.began = 0.0  # the driver of now
        self.clock_set_at = 0.0  # the last time, as it was
        self.kept: dict[str, Measurement] = {}
        self.power_failed = False
        self.most_bad = 0  # cards, of one driver's
        self.steps = 0
        self.dies_at: int | None = None
        self.dead = False
        self.disk = SimulatedDisk(self.random, self.step)

    def _jobs(self) -> Iterator[Job]:
        draw = Random(f"jobs {self.shape.seed}")
        widths = [width for width in (1, 1, 1, 1, 2, 4, 8) if width <= self.shape.cards]
        last: Job | None = None
        for number in range(self.shape.jobs):
            if self.shape.crowded:
                yield job_of(f"crowd {number}", cards=8 if number in (1, 2) else 1)
                continue
            job = job_of(
                f"{self.shape.seed}-{number}",
                cards=draw.choice(widths),
                model=f"m{draw.randrange(5)}",
                isolation=draw.choice(["warm", "warm", "process"]),
            )
            # In every third night the jobs come in pairs, of one cell's two replicates.
            if last is not None and number % 2 and self.shape.seed % 3 == 0:
                job = dataclasses.replace(last, replicate=2)
            last = job
            yield job

    def steady(self) -> float:
        return self.now

    def set_by(self) -> float:
        return sum(by_s for at, by_s in self.shape.clock_steps if at <= self.now)

    def wall(self) -> float:
        return EPOCH_S + self.now + self.set_by()

    def knows_end(self) -> bool:
        """Return whether a driver must know how much time is left: it needs a while to see that the
        clock was set, which moves a deadline and no budget."""
        steps = () if self.shape.budget else self.shape.clock_steps
        return not any(at <= self.now < at + NOTICED_S for at, _ in steps)

    def left_s(self) -> float:
        ends = self.shape.ends_after_s
        if ends is None:
            return inf
        return ends - (self.now - self.began if self.shape.budget else self.wall() - EPOCH_S)

    def trips(self) -> bool:
        fails = self.shape.flaky > 0 and self.flakiness.random() < self.shape.flaky
        self.tally.tripped += fails
        return fails

    @property
    def is_full(self) -> bool:
        full = self.shape.full
        return full is not None and full[0] <= self.now < full[1]

    def step(self) -> None:
        if self.dead:
            raise Died
        self.disk.room = 0 if self.is_full else None
        self.steps += 1
        if self.dies_at is not None and self.steps >= self.dies_at:
            self.dead = True
            raise Died

    def measured(self) -> set[str]:
        if self.disk.flipped:
            return set()
        return {
            row.job_id for row in self.promised.values() if row.final and row.state == "SUCCEEDED"
        }

    def run(self) -> Tally:
        """The whole night.

        Raises:
            Broken, InvariantViolated: something happened that must not.
        """
        with self._in_place():
            frozen: tuple[Any, Measurement] | None = None
            for number, death in enumerate((*self.shape.deaths, "")):
                ended = self._drive(number, death, frozen)
                frozen = None
                if ended is None:
                    break
                if death == "frozen":
                    frozen = ended
                elif death == "power":
                    self.power_failed = True
                    self.disk.lose_power()
                if self.shape.flips and self.disk.is_there(NOWHERE / "night" / "rows"):
                    self.disk.flip_bits(NOWHERE / "night" / "rows", self.shape.flips)
            while self.no_room:  # the last driver ended without its rows: their jobs are run again
                assert self.shape.full is not None
                must(self.tally.drivers < 30, "rows never find room")
                self.now = max(self.now, self.shape.full[1])
                self._drive(len(self.shape.deaths) + self.tally.drivers, "", None)
            self._check_end(self._check_rows())
        return self.tally

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in _DISK_CALLS:
                stack.enter_context(patch.object(real_disk, name, getattr(self.disk, name)))
            stack.enter_context(
                patch.object(driver_module, "STATUS_INTERVAL_S", self.status_interval_s)
            )
            yield

    @property
    def status_interval_s(self) -> float:
        return 30.0 if self.shape.watched else 1e9

    def board(self, plan: Plan) -> Board:
        limits_s = PHASE_LIMITS_S if self.shape.watched else {}
        return Board("night", plan, self.steady(), limits_s=limits_s, longest_pause_s=2 * POLL_S)

    def open_store(self, driver: int) -> DiskStore | MemoryStore:
        return (DiskStore if self.shape.on_disk else MemoryStore)(self, driver)

    def _drive(
        self, number: int, death: str, frozen: tuple[Any, Measurement] | None
    ) -> tuple[Any, Measurement] | None:
        """One driver's turn. None when the run is finished; else its store, and the row of an
        attempt that it had running."""
        self.tally.drivers += 1
        self.living.add(number)
        self.dead, self.steps = False, 0
        calls = self.shape.jobs * (25 if self.shape.on_disk else 8)
        self.dies_at = self.random.randint(1, calls) if death else None
        store: Any = self.open_store(number)
        self.unsafe.clear()
        self.waiting.clear()
        self.no_room = False
        self.rowed.clear()
        late: list[Measurement] = []
        try:
            with store:
                self._write_late(frozen)
                self._end_leftovers(number)
                rows = self._check_rows()
                self._second_driver(number)
                driver = self._driver(store, rows, number, late)
                result = driver.drive()
                must(result.finished, "the driver left before the end")
                self.living.discard(number)
                self.holder = None
                return None
        except Died:
            pass
        except StoreFull:  # on a full disk it does not even begin; somebody tries again later
            assert self.shape.full is not None
            self.now = max(self.now, self.shape.full[1])
            self.living.discard(number)
            self.holder = None
            return self._drive(number, death, None)
        self.tally.deaths[death] += 1
        self.living.discard(number)
        self.now += 5.0 if death == "killed" else 90.0
        return store, (late[-1] if late else self.handed[-1] if self.handed else None)  # type: ignore[return-value]

    def _driver(
        self, store: Any, rows: Sequence[Measurement], number: int, late: list[Measurement]
    ) -> Driver:
        final = {row.job_id: row.state for row in rows if row.final}
        before = store.attempts_set_aside(job.job_id for job in self.jobs)
        for row in rows:
            before[row.job_id] = max(row.attempt_number, before.get(row.job_id, 0))
        again = (None, State.LOST, State.NOT_STARTED)
        planned = [
            PlannedJob(
                job=job,
                action=Action.RUN if final.get(job.job_id) in again else Action.REUSE,
                needs=self._needs(number_of, job),
            )
            for number_of, job in enumerate(self.jobs)
        ]
        self.began = self.now
        how = self._settings()
        schedule = Schedule(planned, how, Spread(), attempts_before=self.attempts_before(before))
        settings = SimulationSettings(seed=self.shape.seed * 10 + number, faults=self.shape.faults)
        cluster = NightCluster(schedule, settings, Spread().estimate, Chance(settings))
        cluster.night, cluster.driver, cluster.now = self, number, self.now
        cluster.failures = Counter()
        cluster.invariants.stop_patience_s = how.stop_s
        cluster.invariants.max_attempts = how.max_attempts
        cluster.invariants.work_until = how.work_until
        cluster.invariants.over_by = how.work_until + how.stop_s
        cluster.invariants.follow_clock = how.follow_clock
        reused = {each.job.job_id for each in planned if each.action is Action.REUSE}
        cluster.invariants.needs = {
            each.job.job_id: set(each.needs) - reused for each in planned if each.needs
        }
        for node in self.nodes:
            cluster.later(self.now, NodeJoined(at=self.now, node=node))
        if self.shape.join_at is not None:
            at = self.now + self.shape.join_at
            cluster.later(at, NodeJoined(at=at, node=node_of(f"late{number}", self.shape.cards)))
        for at in self.shape.faults.node_losses:
            if at > self.now:
                cluster.lose_node_at(at)
        plan = Plan(grid_name="night", jobs=tuple(planned), nodes=tuple(self.nodes))

        def to_measurement(record: Any) -> Measurement:
            made = measurement_of(
                record, run="night", invocation_id=f"i{number}", recorded_at=self.wall()
            )
            late[:] = [made] if record.attempt is not None else late
            return made

        self.invariants = cluster.invariants
        executor = NightExecutor(self, cluster)
        return Driver(
            schedule=executor.watch(schedule),
            executor=executor,
            store=Promises(self, store),
            to_measurement=to_measurement,
            board=self.board(plan),
            view=_View(self),
            stop=StopSignal(),
            clock=lambda: self.steady(),
            wall=self.wall,
            sleep=self._sleep,
            poll_s=POLL_S,
        )

    def _needs(self, number: int, job: Job) -> tuple[str, ...]:
        if self.shape.crowded:
            return (self.jobs[0].job_id,) if job.cards > 1 else ()
        needed = number - 3
        return (self.jobs[needed].job_id,) if self.shape.needy and number % 7 == 6 else ()

    def _settings(self) -> ScheduleSettings:
        if self.shape.ends_after_s is None:
            return ScheduleSettings()
        begins = self.wall() if self.shape.budget else EPOCH_S
        return ScheduleSettings(
            work_until=begins + self.shape.ends_after_s, follow_clock=not self.shape.budget
        )

    def attempts_before(self, known: dict[str, int]) -> dict[str, int]:
        return known

    def _sleep(self, seconds: float) -> None:
        self.step()
        self.now += seconds

    def _end_leftovers(self, number: int) -> None:
        """End leftovers as ``worker.leftovers`` and the nodes' agents do, before any card is given
        out."""
        self.end_leftovers()

    def end_leftovers(self) -> None:
        self.processes = {
            card: driver for card, driver in self.processes.items() if driver in self.living
        }

    def _second_driver(self, number: int) -> None:
        if self.random.random() < 0.3:
            try:
                with self.open_store(1000 + number):
                    raise Broken("two drivers hold the run at once")
            except StoreLocked:
                self.tally.refused += 1

    def _write_late(self, frozen: tuple[Any, Measurement] | None) -> None:
        if frozen is None or frozen[1] is None:
            return
        store, measurement = frozen
        late = dataclasses.replace(measurement, state=State.SUCCEEDED, final=True)
        try:
            store.append(late)
        except StoreLocked:
            return
        raise Broken("a driver that had lost the run has written a row")

    def _check_rows(self) -> Sequence[Measurement]:
        """Everything promised is there, as it was written, once; nothing else is. Returns all."""
        if self.shape.on_disk:
            contents = DiskStore(self, -1).read()
            rows, damaged = contents.measurements, [each.path.name for each in contents.damaged]
        else:
            rows, damaged = tuple(self.kept.values()), []
        found: Counter[tuple[str, str]] = Counter()
        handed: dict[tuple[str, str], list[Measurement]] = {}
        for each in self.handed:
            handed.setdefault((each.attempt_id, each.invocation_id), []).append(each)
        for row in rows:
            key = (row.attempt_id, row.invocation_id)
            found[key] += row.attempt_number > 0 and not is_late(row)
            known = row in handed.get(key, []) or self._is_of_journal(row)
            must(known, f"a row that nobody wrote: {row.attempt_id}")
        twice = [key for key, count in found.items() if count > 1]
        must(not twice, f"attempts with two rows: {twice}")
        seen = {(row.attempt_id, row.invocation_id) for row in rows}
        for (attempt_id, invocation), row in self.promised.items():
            # In its log, set aside from there, or in Parquet, where others lie beside it.
            log = self.files.get((attempt_id, invocation), "none")
            names = (log, f"{row.job_id}-{row.attempt_number}-", "rows-", "line-")
            reported = any(name.startswith(names) for name in damaged) and bool(self.disk.flipped)
            there = (attempt_id, invocation) in seen
            must(there or reported, f"the row of attempt {attempt_id} is lost")
        numbers = Counter(r.attempt_id for r in rows if r.attempt_number and not is_late(r))
        must(max(numbers.values(), default=1) == 1, f"attempt ids used twice: {numbers}")
        self.tally.rows = len(rows)
        return rows

    def _is_of_journal(self, row: Measurement) -> bool:
        return row in self.journalled.get(row.attempt_id, [])

    def _check_end(self, rows: Sequence[Measurement]) -> None:
        final: dict[str, list[str]] = {}
        for row in rows:
            if row.final:
                final.setdefault(row.job_id, []).append(row.state)
        again = (State.LOST, State.NOT_STARTED)
        for job in self.jobs:
            states = final.get(job.job_id, [])
            must(bool(states), f"job {job.job_id} has no final row")
            ended = [state for state in states if state not in again]
            must(len(ended) <= 1 or bool(self.disk.flipped), f"job {job.job_id} ended as {states}")
            if not self.shape.accidents and not self.shape.faults.node_losses:
                fine = states[-1] == "SUCCEEDED" or self._too_few_cards(job)
                fine = fine or (self.shape.needy and states[-1] == "NOT_STARTED")
                must(fine, f"job {job.job_id} ended {states} although sound cards were there")
        if not self.power_failed and not self.disk.flipped:
            missing = self.begun - {row.attempt_id for row in rows}
            must(not missing, f"attempts that began and left no row: {sorted(missing)[:3]}")

    def _too_few_cards(self, job: Job) -> bool:
        """Return whether bad cards may have left no set for it, let as many of its workers down as
        a job may have, or put their node out of use, as half of a server's cards do."""
        return bool(self.shape.faults.bad_cards) and (job.cards > 1 or self.most_bad >= 4)

    @property
    def replay(self) -> str:
        kind = " --on-disk" if self.shape.on_disk else ""
        return f"python tests/night/million.py --replay {self.shape.seed}{kind}"


class _View:
    """Counts pauses, and looks at the figures that people see."""

    def __init__(self, night: Night) -> None:
        self._night, self._tally = night, night.tally
        self._shown_at = night.now

    def line(self, text: str) -> None:
        self._tally.paused += text.startswith("PAUSED")

    def show(self, status: RunStatus) -> None:
        night = self._night
        silent_s, self._shown_at = night.now - self._shown_at, night.now
        if night.shape.watched:
            must(silent_s <= night.status_interval_s + NOTICED_S, f"no status for {silent_s:.0f} s")
        must(abs(status.at - night.wall()) < 0.1, f"the status is of {status.at}")
        wrong_s = status.elapsed_s - (night.now - night.began)
        must(abs(wrong_s) < 20.0, f"the status is wrong by {wrong_s:.0f} s about the time it took")

    def close(self) -> None:
        """Nothing."""


def run_night(seed: int, *, on_disk: bool = False) -> Tally:
    """One night; a violation says how to replay it."""
    night = Night(Shape.of(seed, on_disk=on_disk))
    try:
        return night.run()
    except (Exception, Broken) as error:
        kind = error if isinstance(error, InvariantViolated | Broken) else repr(error)
        raise InvariantViolated(f"{kind}\nreplay: {night.replay}") from error
