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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from disk_model import NOWHERE, SimulatedDisk
from schedule_cases import job as job_of
from schedule_cases import node as node_of

from orchestrator import driver as driver_module
from orchestrator.attempt import Outcome
from orchestrator.cluster import Card
from orchestrator.derive import measurement_of
from orchestrator.driver import Driver, StopSignal
from orchestrator.errors import StoreFull, StoreLocked
from orchestrator.events import (
    AttemptEnded,
    Command,
    Event,
    NodeJoined,
    NodeLeft,
    RunAttempt,
    StartWorker,
    StopWorker,
    Tick,
    WorkerStopped,
)
from orchestrator.executor import Progress
from orchestrator.job import Job, State
from orchestrator.measurement import Measurement
from orchestrator.notes import Note, Notes
from orchestrator.plan import Action, Plan, PlannedJob
from orchestrator.results import disk as real_disk
from orchestrator.results import store as store_module
from orchestrator.results.store import Store
from orchestrator.run_status import Board
from orchestrator.scheduling.estimate import Estimate
from orchestrator.scheduling.invariants import Invariants, InvariantViolated
from orchestrator.scheduling.retry import POLICIES
from orchestrator.scheduling.schedule import Schedule, ScheduleSettings
from orchestrator.scheduling.virtual_cluster import Faults, SimulationSettings, VirtualCluster

#: A job that is open after so long a virtual time starves.
TOO_LONG_S = 3e5
#: Two strikes, then one after each of three quarantines; then it is used no more.
MOST_BAD_STARTS = 5
ELSEWHERE = Path("/elsewhere")
_DISK_CALLS = (
    *(
        "create",
        "open_to_append",
        "write",
        "sync",
        "close",
        "rename",
        "remove",
        "read",
        "names",
        "is_there",
    ),
    *("make_directory", "make_private_directory", "is_ours", "sync_directory"),
    *("read_small", "numbers"),
)


class Died(BaseException):
    """The driver is no more: it can do nothing, not even tidy up."""


class Broken(BaseException):
    """Something happened that must not. Nothing that is tested gets to handle it."""


def must(holds: bool, message: str) -> None:
    """Raise ``Broken`` unless it holds."""
    if not holds:
        raise Broken(message)


def is_late(row: Measurement) -> bool:
    """Whether a row is what a node brought after its attempt had been given up: a second row of the
    attempt, which counts for nothing."""
    return not row.final and row.reason.startswith("came after the attempt was given up")


class Estimates:
    """Half a minute to ten minutes, by job."""

    def estimate(self, job: Job) -> Estimate:
        """Known exactly."""
        return Estimate(load_s=20.0, run_s=Random(job.dataset).uniform(30, 600))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a night is like, all of it drawn from its seed."""

    seed: int
    on_disk: bool
    jobs: int
    nodes: int
    cards: int
    deaths: tuple[str, ...]  # of drivers, in order: killed, power or frozen
    faults: Faults
    join_at: float | None
    full: tuple[float, float] | None  # when the disk is full, seconds of the night
    flips: int  # bits, between two drivers
    accidents: bool  # whether jobs may fail for other reasons than their cards
    crowded: bool = False  # two gangs need the first of many jobs

    @classmethod
    def of(cls, seed: int, *, on_disk: bool) -> Shape:
        """The night of this seed. One in twelve is crowded: gangs may begin only when all cards
        have long been busy, and many jobs wait for each."""
        if seed % 12 == 7 and not on_disk:
            return cls(
                seed=seed,
                on_disk=False,
                jobs=120,
                nodes=1,
                cards=8,
                deaths=(),
                faults=Faults(),
                join_at=None,
                full=None,
                flips=0,
                accidents=False,
                crowded=True,
            )
        draw = Random(f"night {seed}")
        rate = draw.choice([0.0, 0.0, 0.03, 0.1])
        bad = draw.choice([0.0, 0.0, 0.2])
        losses = sorted(draw.uniform(50, 4000) for _ in range(draw.choice([0, 0, 1, 3])))
        kinds = ["killed", "killed", "power", "frozen"]
        start = draw.uniform(20, 2000)
        return cls(
            seed=seed,
            on_disk=on_disk,
            jobs=draw.randint(4, 14) if on_disk else draw.randint(30, 150),
            nodes=draw.choice([1, 2, 3]),
            cards=draw.choice([2, 8]),
            deaths=tuple(draw.choice(kinds) for _ in range(draw.choice([0, 1, 1, 2, 3]))),
            faults=Faults(
                crash=rate,
                hang=rate / 4,
                error=rate / 2,
                start_failure=rate,
                bad_cards=bad,
                node_losses=tuple(losses),
                rejoin_after_s=draw.choice([30.0, 600.0]),
                no_start=rate / 8,
                stuck=rate / 8,
                late_results=draw.random() < 0.5,
            ),
            join_at=draw.choice([None, 100.0]),
            full=draw.choice([None, None, (start, start + draw.uniform(30, 4000))]),
            flips=draw.choice([0, 0, 2]) if on_disk else 0,
            accidents=rate > 0,
        )


@dataclass(slots=True)
class Tally:
    """What a night, or many, came to."""

    nights: int = 0
    events: int = 0
    commands: int = 0
    drivers: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    faults: int = 0
    refused: int = 0  # second drivers
    paused: int = 0
    late: int = 0

    def add(self, other: Tally) -> None:
        """Count another night as well."""
        for each in dataclasses.fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class Lock:
    """The run's lock: who holds it, and whether that driver lives. What ``RunLock`` promises, which
    has tests of its own with real processes."""

    def __init__(self, night: Night, driver: int) -> None:
        self.night, self.driver = night, driver
        self.silence_means_death_s = float("inf")

    def acquire(self) -> None:
        """Refused while another driver lives, or seems to."""
        holder = self.night.holder
        if holder is not None and holder in self.night.living:
            raise StoreLocked(f"driver {holder} holds the run")
        must(
            holder is None or holder not in self.night.living or holder == self.driver,
            f"drivers {holder} and {self.driver} hold the run at once",
        )
        self.night.holder = self.driver

    def still_mine(self) -> None:
        """Asked before every write."""
        if self.night.holder != self.driver:
            raise StoreLocked("taken over")

    def release(self) -> None:
        """A dead driver releases nothing."""
        if self.night.holder == self.driver and self.driver in self.night.living:
            self.night.holder = None


class DiskStore(Store):
    """The real store, on the night's disk, with the night's lock."""

    def __init__(self, night: Night, driver: int) -> None:
        super().__init__(NOWHERE, "night")
        self._lock = Lock(night, driver)  # type: ignore[assignment]
        self.night = night

    def rows(self) -> list[Measurement]:
        """As a reader sees them."""
        return list(self.read().measurements)


class MemoryStore:
    """A store without a disk, with the promises of the real one."""

    def __init__(self, night: Night, driver: int) -> None:
        self._lock = Lock(night, driver)
        self.night = night

    def __enter__(self) -> MemoryStore:
        self._lock.acquire()
        for row in list(self.night.elsewhere):
            self._keep(row)
        for note in list(self.night.notes.values()):
            self._keep(note)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def begin(self, *notes: Note) -> None:
        """Note attempts."""
        self.night.step()
        self._lock.still_mine()
        self.night.notes |= {note.attempt_id: note.row() for note in notes}

    def append(self, *measurements: Measurement) -> None:
        """Keep rows."""
        self.night.step()
        self._lock.still_mine()
        if self.night.is_full:
            raise StoreFull("cannot write: no space left")
        for measurement in measurements:
            self._keep(measurement)

    def _keep(self, measurement: Measurement) -> None:
        key = measurement.attempt_id
        if measurement.attempt_number == 0:
            key += measurement.invocation_id
        if is_late(measurement):
            key += " late"
        must(key not in self.night.kept, f"attempt {key} has two rows")
        self.night.kept[key] = measurement
        self.night.notes.pop(measurement.attempt_id, None)
        if measurement in self.night.elsewhere:
            self.night.elsewhere.remove(measurement)

    def make_reserve(self) -> None:
        """See whether there is room."""
        if self.night.is_full:
            raise StoreFull("cannot write: no space left")

    def spill(self, measurement: Measurement) -> Path:
        """To the other disk."""
        if measurement not in self.night.elsewhere:
            self.night.elsewhere.append(measurement)
        return NOWHERE / "elsewhere" / measurement.attempt_id

    def attempts_set_aside(self, _: Iterable[str]) -> dict[str, int]:
        """Nothing is damaged here."""
        return {}

    def rows(self) -> list[Measurement]:
        """All of them."""
        return list(self.night.kept.values())


class Promises:
    """The store as the driver sees it; remembers what the store has promised."""

    def __init__(self, night: Night, store: DiskStore | MemoryStore) -> None:
        self.night, self.store = night, store

    def begin(self, *notes: Note) -> None:
        """Note attempts."""
        self.night.handed += [note.row() for note in notes]
        self.store.begin(*notes)

    def append(self, *measurements: Measurement) -> None:
        """Write rows: on return they are promised."""
        night = self.night
        night.handed += measurements
        ids = {measurement.attempt_id for measurement in measurements}
        try:
            path = self.store.append(*measurements)
        except StoreFull:
            night.waiting |= ids
            raise
        night.waiting -= ids
        for measurement in measurements:
            if not is_late(measurement):
                key = measurement.attempt_id, measurement.invocation_id
                night.promised[key] = measurement
                night.files[key] = path.name if path else ""
        night.unsafe -= ids

    def make_reserve(self) -> None:
        """Room for more."""
        self.store.make_reserve()

    def spill(self, measurement: Measurement) -> Path | None:
        """Write a row elsewhere: what is there is promised, too."""
        self.night.handed.append(measurement)
        self.night.waiting.add(measurement.attempt_id)
        place = self.store.spill(measurement)
        if place is not None and not is_late(measurement):
            key = measurement.attempt_id, measurement.invocation_id
            self.night.promised[key] = measurement
        return place


class Watched:
    """The schedule as the driver sees it; every event and command is checked on the way."""

    def __init__(self, schedule: Schedule, invariants: Invariants, tally: Tally) -> None:
        self.schedule, self.invariants, self.tally = schedule, invariants, tally

    def handle(self, event: Event) -> list[Command]:
        """Observe, decide, check."""
        self.tally.events += 1
        self.invariants.observe(event)
        commands = self.schedule.handle(event)
        self.invariants.check(commands)
        self.tally.commands += len(commands)
        return commands


class NightCluster(VirtualCluster):
    """Virtual nodes on which the processes of a dead driver live on."""

    night: Night
    driver: int
    failures: Counter[Card]  # to start, of bad cards

    def _start(self, command: StartWorker) -> None:
        held = self.night.processes.get(command.card)
        must(held is None, f"{command.card} has a process of driver {held} already")
        self.night.processes[command.card] = self.driver
        super()._start(command)

    def _happens(self, event: Event) -> list[Event]:
        process = None
        if isinstance(event, WorkerStopped):
            process = self.processes.get(event.worker_id)
        happened = super()._happens(event)
        self.night.most_bad = max(self.night.most_bad, len(self.bad))
        if process is not None:
            self.night.processes.pop(process.card, None)
            if process.state == "starting" and process.card in self.bad:
                self.failures[process.card] += 1
                count = self.failures[process.card]
                tried = f"{process.card}, on which no worker comes up, is tried {count} times"
                must(count <= MOST_BAD_STARTS, tried)
        for each in happened:
            if isinstance(each, NodeLeft):
                for card in [c for c in self.night.processes if c.node_id == each.node_id]:
                    del self.night.processes[card]
        return happened


class NightExecutor:
    """The cluster as the driver sees it: an ``Executor`` in virtual time."""

    def __init__(self, night: Night, cluster: NightCluster) -> None:
        self.night, self.cluster = night, cluster
        self.workers: dict[Card, str] = {}
        self.failed: dict[str, set[Card]] = {}  # by job id: where its last attempt failed
        self.suspects: set[Card] = set()  # where anything has failed
        self.gangs = self.overtaken = 0

    def _must_be_fair(self, command: RunAttempt) -> None:
        """No gang starves, and no job is sent where it has just failed."""
        night, attempt = self.night, command.attempt
        failed = self.failed.pop(attempt.job_id, set())
        if len(attempt.cards) == 1:
            sound = [
                card
                for node in self.cluster.nodes.values()
                for card in node.cards
                if card not in self.suspects and card not in self.cluster.bad
            ]
            same = set(attempt.cards) & failed
            must(not same or not sound, f"{attempt.attempt_id} runs where the last attempt failed")
        if night.shape.crowded:
            self.gangs += len(attempt.cards) > 1
            free = night.jobs[0].job_id in night.measured()
            self.overtaken += free and len(attempt.cards) == 1 and not self.gangs
            room = sum(len(node.cards) for node in night.nodes)
            must(
                self.overtaken <= 4 * room, f"a gang starves: {self.overtaken} jobs went before it"
            )

    def perform(self, command: StartWorker | StopWorker | RunAttempt) -> None:
        """Check what no command can show, then do it."""
        night = self.night
        night.step()
        if isinstance(command, StartWorker | RunAttempt):
            started = type(command).__name__
            must(not night.waiting, f"{started} while rows wait for room: {night.waiting}")
        if isinstance(command, RunAttempt):
            attempt_id, job_id = command.attempt.attempt_id, command.attempt.job_id
            # A power failure may take the note of an attempt away, and nobody has heard of it.
            known = attempt_id in night.begun and not night.power_failed
            must(not known, f"attempt id {attempt_id} is used twice")
            must(job_id not in night.measured(), f"{job_id} is measured and runs again")
            night.begun.add(attempt_id)
            self._must_be_fair(command)
        if isinstance(command, StartWorker):
            self.workers[command.card] = command.worker_id
        self.cluster._perform(command)

    def events(self, timeout_s: float) -> list[Event]:
        """The next that happens; time passes."""
        night, cluster = self.night, self.cluster
        night.step()
        must(night.now < TOO_LONG_S, f"no end after {night.now:,.0f} s")
        unsafe = night.unsafe - night.waiting
        must(not timeout_s or not unsafe, f"the driver waits and rows are not safe: {unsafe}")
        if not cluster.queue or cluster.queue[0][0] > night.now + timeout_s:
            night.now += timeout_s
            cluster.now = night.now
            return []
        at, _, event = heappop(cluster.queue)
        night.now = cluster.now = max(cluster.now, at)
        happened = [each for each in cluster._happens(event) if not isinstance(each, Tick)]
        for each in happened:
            if isinstance(each, AttemptEnded):
                self._ended(each.outcome)
            elif isinstance(each, WorkerStopped) and each.failure is not None:
                self.suspects |= {c for c, w in self.workers.items() if w == each.worker_id}
        return happened

    def _ended(self, outcome: Outcome) -> None:
        attempt_id = outcome.attempt_id
        run = self.cluster.invariants.running.get(attempt_id)
        if run is None:
            self.night.tally.late += 1
            return
        self.night.unsafe.add(attempt_id)
        if outcome.failure is not None:
            self.suspects |= set(run.attempt.cards)
            if POLICIES[outcome.failure.failure_class].elsewhere == "card":
                self.failed[run.attempt.job_id] = set(run.attempt.cards)

    def progress(self) -> dict[str, Progress]:
        """Nobody looks."""
        return {}

    def close(self) -> None:
        """Nothing to close."""


class Night:
    """What outlives a driver: time, cards, processes, the store, and what was promised of it."""

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
        self.begun: set[str] = set()
        self.handed: list[Measurement] = []
        self.promised: dict[tuple[str, str], Measurement] = {}
        self.files: dict[tuple[str, str], str] = {}  # of promised rows, by the same keys
        self.notes: dict[str, Measurement] = {}
        self.kept: dict[str, Measurement] = {}
        self.elsewhere: list[Measurement] = []  # on the other disk
        self.power_failed = False
        self.most_bad = 0  # cards, of one driver's
        self.steps = 0
        self.dies_at: int | None = None
        self.dead = False
        self.disk = SimulatedDisk(self.random, self.step)

    def _jobs(self) -> Iterator[Job]:
        draw = Random(f"jobs {self.shape.seed}")
        widths = [width for width in (1, 1, 1, 1, 2, 4, 8) if width <= self.shape.cards]
        for number in range(self.shape.jobs):
            if self.shape.crowded:
                yield job_of(f"crowd {number}", cards=8 if number in (1, 2) else 1)
                continue
            yield job_of(
                f"{self.shape.seed}-{number}",
                cards=draw.choice(widths),
                model=f"m{draw.randrange(5)}",
                isolation=draw.choice(["warm", "warm", "process"]),
            )

    @property
    def is_full(self) -> bool:
        """Whether the disk is full now."""
        full = self.shape.full
        return full is not None and full[0] <= self.now < full[1]

    def step(self) -> None:
        """A moment at which the driver may die."""
        if self.dead:
            raise Died
        self.disk.room = 0 if self.is_full else None
        self.steps += 1
        if self.dies_at is not None and self.steps >= self.dies_at:
            self.dead = True
            raise Died

    def measured(self) -> set[str]:
        """Jobs of which a success was promised, and is not known to be damaged."""
        if self.disk.flipped:
            return set()
        return {
            row.job_id for row in self.promised.values() if row.final and row.state == "SUCCEEDED"
        }

    # ------------------------------------------------------------ one driver after the other

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
            while self.elsewhere or self._spilled():
                assert self.shape.full is not None
                self.now = max(self.now, self.shape.full[1])
                self._drive(len(self.shape.deaths) + self.tally.drivers, "", None)
            self._check_rows()
            self._check_end()
        return self.tally

    def _spilled(self) -> bool:
        """Whether the real store has put rows on the other disk."""
        return self.disk.is_there(ELSEWHERE) and bool(self.disk.names(ELSEWHERE))

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in _DISK_CALLS:
                stack.enter_context(patch.object(real_disk, name, getattr(self.disk, name)))
            stack.enter_context(
                patch.object(store_module, "spill_directories", lambda _: [ELSEWHERE])
            )
            stack.enter_context(patch.object(driver_module, "STATUS_INTERVAL_S", 1e9))
            yield

    def open_store(self, driver: int) -> DiskStore | MemoryStore:
        """The store, as a new driver opens it."""
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
        late: list[Measurement] = []
        try:
            with store:
                self._write_late(frozen)
                self._end_leftovers(number)
                self._check_rows()
                self._second_driver(number)
                driver = self._driver(store, number, late)
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

    def _driver(self, store: Any, number: int, late: list[Measurement]) -> Driver:
        rows = store.rows()
        final = {row.job_id: row.state for row in rows if row.final}
        before = store.attempts_set_aside(job.job_id for job in self.jobs)
        for row in rows:
            before[row.job_id] = max(row.attempt_number, before.get(row.job_id, 0))
        again = (None, State.LOST, State.NOT_STARTED)
        planned = [
            PlannedJob(
                job=job,
                action=Action.RUN if final.get(job.job_id) in again else Action.REUSE,
                needs=(self.jobs[0].job_id,) if self.shape.crowded and job.cards > 1 else (),
            )
            for job in self.jobs
        ]
        schedule = Schedule(
            planned, ScheduleSettings(), Estimates(), attempts_before=self.attempts_before(before)
        )
        settings = SimulationSettings(seed=self.shape.seed * 10 + number, faults=self.shape.faults)
        cluster = NightCluster(schedule, settings, Estimates().estimate)
        cluster.night, cluster.driver, cluster.now = self, number, self.now
        cluster.failures = Counter()
        cluster.invariants.stop_patience_s = ScheduleSettings().stop_s
        for node in self.nodes:
            cluster.later(self.now, NodeJoined(at=self.now, node=node))
        if self.shape.join_at is not None:
            at = self.now + self.shape.join_at
            cluster.later(at, NodeJoined(at=at, node=node_of(f"late{number}", self.shape.cards)))
        for at in self.shape.faults.node_losses:
            if at > self.now:
                cluster.lose_node_at(at)
        plan = Plan(grid_name="night", jobs=tuple(planned), nodes=tuple(self.nodes))
        board = Board(run="night", plan=plan, started_at=self.now)

        def to_measurement(record: Any) -> Measurement:
            made = measurement_of(
                record, run="night", invocation_id=f"i{number}", recorded_at=self.now
            )
            late[:] = [made] if record.attempt is not None else late
            return made

        self.invariants = cluster.invariants
        return Driver(
            schedule=Watched(schedule, cluster.invariants, self.tally),
            executor=NightExecutor(self, cluster),
            store=Promises(self, store),
            to_measurement=to_measurement,
            notes=Notes(run="night", invocation_id=f"i{number}"),
            board=board,
            view=_View(self.tally),
            stop=StopSignal(),
            clock=lambda: self.now,
            sleep=self._sleep,
            poll_s=60.0,
        )

    def attempts_before(self, known: dict[str, int]) -> dict[str, int]:
        """The numbers that earlier drivers have used up, as rows tell."""
        return known

    def _sleep(self, seconds: float) -> None:
        self.step()
        self.now += seconds

    # ------------------------------------------------------------ what is tried in between

    def _end_leftovers(self, number: int) -> None:
        """What ``worker.leftovers`` and the nodes' agents do before any card is given out."""
        self.end_leftovers()

    def end_leftovers(self) -> None:
        """Processes of drivers that are dead end."""
        self.processes = {
            card: driver for card, driver in self.processes.items() if driver in self.living
        }

    def _second_driver(self, number: int) -> None:
        """Somebody starts another by mistake."""
        if self.random.random() < 0.3:
            try:
                with self.open_store(1000 + number):
                    raise Broken("two drivers hold the run at once")
            except StoreLocked:
                self.tally.refused += 1

    def _write_late(self, frozen: tuple[Any, Measurement] | None) -> None:
        """A driver that was only frozen comes back and writes the row that it was about to."""
        if frozen is None or frozen[1] is None:
            return
        store, measurement = frozen
        late = dataclasses.replace(measurement, state=State.SUCCEEDED, final=True)
        try:
            store.append(late)
        except StoreLocked:
            return
        raise Broken("a driver that had lost the run has written a row")

    # ------------------------------------------------------------ what must hold

    def _check_rows(self) -> None:
        """Everything promised is there, as it was written, once; nothing else is."""
        if self.shape.on_disk:
            contents = DiskStore(self, -1).read()
            rows, damaged = contents.measurements, [each.path.name for each in contents.damaged]
        else:
            rows, damaged = tuple(self.kept.values()), []
        found: Counter[tuple[str, str]] = Counter()
        handed = {(m.attempt_id, m.invocation_id): [] for m in self.handed}
        for each in self.handed:
            handed[each.attempt_id, each.invocation_id].append(each)
        for row in rows:
            key = (row.attempt_id, row.invocation_id)
            found[key] += row.attempt_number > 0 and not is_late(row)
            must(row in handed.get(key, []), f"a row that nobody wrote: {row.attempt_id}")
        twice = [key for key, count in found.items() if count > 1]
        must(not twice, f"attempts with two rows: {twice}")
        seen = {(row.attempt_id, row.invocation_id) for row in rows}
        for (attempt_id, invocation), row in self.promised.items():
            file = self.files.get((attempt_id, invocation), f"{row.job_id}-{row.attempt_number}-")
            reported = any(name.startswith(file) for name in damaged) and bool(self.disk.flipped)
            there = (attempt_id, invocation) in seen
            must(there or reported, f"the row of attempt {attempt_id} is lost")
        numbers = Counter(r.attempt_id for r in rows if r.attempt_number and not is_late(r))
        must(max(numbers.values(), default=1) == 1, f"attempt ids used twice: {numbers}")
        self.tally.rows = len(rows)

    def _check_end(self) -> None:
        """Every job has ended exactly once, and every attempt that began has a row."""
        store = self.open_store(-1)
        rows = store.rows()
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
                must(fine, f"job {job.job_id} ended {states} although sound cards were there")
        if not self.power_failed and not self.disk.flipped:
            missing = self.begun - {row.attempt_id for row in rows}
            must(not missing, f"attempts that began and left no row: {sorted(missing)[:3]}")

    def _too_few_cards(self, job: Job) -> bool:
        """Whether bad cards may have left no set for it, or let as many of its workers down as a
        job may have."""
        return bool(self.shape.faults.bad_cards) and (job.cards > 1 or self.most_bad >= 5)

    @property
    def replay(self) -> str:
        """How to see this night again."""
        kind = " --on-disk" if self.shape.on_disk else ""
        return f"python tests/night/replay.py {self.shape.seed}{kind}"


class _View:
    """Counts pauses."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def line(self, text: str) -> None:
        """Look for a pause."""
        self._tally.paused += text.startswith("PAUSED")

    def show(self, status: object) -> None:
        """Nobody looks."""

    def close(self) -> None:
        """Nothing."""


def run_night(seed: int, *, on_disk: bool, make: Callable[[Shape], Night] = Night) -> Tally:
    """One night; a violation says how to replay it."""
    night = make(Shape.of(seed, on_disk=on_disk))
    try:
        return night.run()
    except (Exception, Broken) as error:
        kind = error if isinstance(error, InvariantViolated | Broken) else repr(error)
        raise InvariantViolated(f"{kind}\nreplay: {night.replay}") from error
