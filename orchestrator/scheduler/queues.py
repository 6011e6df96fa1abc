"""Jobs that wait: for cards, or for other jobs.

Gangs wait by width. One-card jobs wait in a bucket per residency key, since a worker that holds
the model should take the next of the same key; jobs that need a process of their own share one
bucket. Jobs that must avoid some card after a failure wait apart. Every queue is longest first,
which ends a run soonest; where some jobs are *firsts*, it gives them out before the others.
Without a deadline firsts are the jobs that others wait for; with one, those that tell most
(``deadline.py``).

What differs from one process to the next (memory layout, autotuned kernels, clocks) shows in no
repeat within a process, so ``replicates: N`` starts a job N times. Three rules keep replicates
independent. A process serves one replicate number only. The order of cells within a loaded model,
and of models, is drawn by a seed that the run keeps (a randomised block design: R. A. Fisher, The
Design of Experiments, 1935), so that a drift over the night falls on no cell alone. And a cell goes
to a card that it has not been on, where there is one.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from orchestrator.core.job import Job, State
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Card
from orchestrator.scheduler.state import JobRecord, Phase, Worker, WorkerState


def drawn(seed: int, name: str) -> float:
    """A number from 0 to 1 that follows from the seed and the name alone: a run that is resumed
    draws the same order for what is left of it."""
    digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def replicated_cells(jobs: Iterable[Job]) -> frozenset[str]:
    """Ids of the cells that have more than one replicate."""
    return frozenset(job.cell_id for job in jobs if job.replicate > 1)


#: The job's duration, or the place drawn for it; then the batch size, the order and the token.
_Entry = tuple[float, int, int, int, JobRecord]

#: Jobs that are considered for one card where some suit it better than others.
LOOK_AHEAD = 32

#: Places of the lists whose order is drawn.
_DRAWN = (1, 3)


class DurationQueue:
    """Jobs sorted by duration, or as drawn; those that are no firsts come after all others. Equal
    ones: smaller batch first (its failure prunes the larger)."""

    def __init__(self) -> None:
        #: Firsts by duration, firsts as drawn, and the others alike; each ascending, and may hold
        #: void entries.
        self._entries: tuple[list[_Entry], ...] = ([], [], [], [])
        self._length = 0
        self.firsts = 0  # how many are firsts
        self.work_s = 0.0  # sum of durations

    def __len__(self) -> int:
        return self._length

    def push(self, record: JobRecord) -> None:
        """Add one job."""
        insort(self._entries[_place(record)], self._enter(record))

    def extend(self, records: Iterable[JobRecord]) -> None:
        """Add many at once, at the cost of one sort."""
        for record in records:
            self._entries[_place(record)].append(self._enter(record))
        for entries in self._entries:
            entries.sort()

    def discard(self, record: JobRecord) -> None:
        """Take a job out wherever it is; its entry is dropped when it surfaces."""
        if record.queue is not self:
            raise ValueError(f"{record.job_id} does not wait in this queue")
        record.queue = None
        record.token += 1
        self._length -= 1
        self.firsts -= record.first
        self.work_s = self.work_s - record.duration if self._length else 0.0

    def longest(self) -> JobRecord | None:
        """The longest job, or the next as drawn, left where it is."""
        for entries in self._entries:
            record = _live(entries, len(entries) - 1)
            if record is not None:
                return record
        return None

    def longest_within(self, seconds: float, cards: Iterable[Card] = ()) -> JobRecord | None:
        """The longest job of at most ``seconds``, left where it is; of replicates the next one,
        if possible one that has not been on any of these cards."""
        for place, entries in enumerate(self._entries):
            if place in _DRAWN:
                record = _next_drawn(entries, seconds, cards)
            else:
                record = _live(entries, bisect_right(entries, seconds, key=_first_field) - 1)
            if record is not None:
                return record
        return None

    def shortest_within(self, seconds: float) -> JobRecord | None:
        """The shortest job if it is of at most ``seconds``, left where it is."""
        for place, entries in enumerate(self._entries):
            if place in _DRAWN:
                live = [record for *_, token, record in entries if token == record.token]
                shortest_one = min(live, key=_duration, default=None)
                if shortest_one is not None and shortest_one.duration <= seconds:
                    return shortest_one
                continue
            while entries and entries[0][0] <= seconds:
                shortest = entries[0][0]
                record = _live(entries, bisect_right(entries, shortest, key=_first_field) - 1)
                if record is not None:
                    return record
        return None

    def _enter(self, record: JobRecord) -> _Entry:
        record.token += 1
        record.queue = self
        self._length += 1
        self.firsts += record.first
        self.work_s += record.duration
        place = record.duration if record.draw is None else record.draw
        return (place, -record.batch_size, -record.order, record.token, record)


def _live(entries: list[_Entry], at: int) -> JobRecord | None:
    """The job at this place or the nearest before it; void entries on the way are dropped."""
    while at >= 0 and entries[at][3] != entries[at][4].token:
        entries.pop(at)
        at -= 1
    return entries[at][4] if at >= 0 else None


def _next_drawn(entries: list[_Entry], seconds: float, cards: Iterable[Card]) -> JobRecord | None:
    """The next job as drawn that is short enough; of the next few one that is new to the cards."""
    first: JobRecord | None = None
    looked = 0
    for at in range(len(entries) - 1, -1, -1):
        *_, token, record = entries[at]
        if token != record.token:
            entries.pop(at)
        elif record.duration <= seconds:
            first = first or record
            looked += 1
            if not any(card in record.cell_cards for card in cards):
                return record
            if looked == LOOK_AHEAD:
                break
    return first


def _place(record: JobRecord) -> int:
    return 2 * (not record.first) + (record.draw is not None)


def _first_field(entry: _Entry) -> float:
    return entry[0]


def _duration(record: JobRecord) -> float:
    return record.duration


#: The bucket of jobs with ``isolation: process``; no residency key is empty.
FRESH = ""


@dataclass(slots=True, eq=False)
class Bucket:
    """One-card jobs of one residency key, and the warm workers that serve them."""

    key: str
    load_s: float
    replicate: int = 1  # of its jobs; those of ``FRESH`` may have any
    draw: float = 0.0  # its place among the buckets of a run with replicates
    queue: DurationQueue = field(default_factory=DurationQueue)
    workers: dict[str, Worker] = field(default_factory=dict)
    starting: int = 0  # of the workers

    @property
    def demand_s(self) -> float:
        """Time that its jobs would take with one more worker."""
        return self.queue.work_s / (len(self.workers) + 1)


class _LazyMaxHeap:
    """The bucket with the largest value, where values change often."""

    def __init__(self, value: Callable[[Bucket], float | None]) -> None:
        self._value = value  # None: not a candidate
        self._heap: list[tuple[float, int, Bucket]] = []
        self._count = 0
        self._limit = 64

    def update(self, bucket: Bucket) -> None:
        value = self._value(bucket)
        if value is not None:
            self._count += 1
            heappush(self._heap, (-value, self._count, bucket))
        if len(self._heap) > self._limit:
            self._compact()

    def top(self) -> Bucket | None:
        while self._heap:
            value, _, bucket = self._heap[0]
            if self._value(bucket) == -value:
                return bucket
            heappop(self._heap)
        return None

    def _compact(self) -> None:
        """Drop what is out of date, so that the heap grows with the buckets, not the decisions."""
        live = {id(entry[2]): entry for entry in self._heap if self._value(entry[2]) == -entry[0]}
        self._heap = list(live.values())
        heapify(self._heap)
        self._limit = 64 + 4 * len(self._heap)


def _demand(bucket: Bucket) -> float | None:
    spoken_for = bucket.starting  # each worker that is starting will take a job
    return bucket.demand_s if len(bucket.queue) > spoken_for else None


def _unheld_work(bucket: Bucket) -> float | None:
    return bucket.queue.work_s if len(bucket.queue) and not bucket.workers else None


def _draw(bucket: Bucket) -> float | None:
    return bucket.draw if len(bucket.queue) and not bucket.workers else None


def _firsts(bucket: Bucket) -> float | None:
    return _demand(bucket) if bucket.queue.firsts > bucket.starting else None


class PendingJobs:
    """Every waiting job for one kind of accelerator."""

    def __init__(self, *, ordered: bool = False, seed: int | None = None) -> None:
        self.seed = seed  # draws the order of a run that has replicates; None: it has none
        self.gangs: dict[int, DurationQueue] = {}  # by width, all above 1
        self.buckets: dict[str, Bucket] = {}
        self.staff: dict[str, Worker] = {}  # every worker that serves some bucket
        self.starting = 0  # of the staff
        self.particular: dict[int, dict[str, JobRecord]] = {}  # by width, then job id
        self._apart_s: defaultdict[int, float] = defaultdict(float)  # durations of these, by width
        self.card_seconds = 0.0  # of all that wait here
        self.single_work_s = 0.0  # of the warm buckets
        self.work_s_of: defaultdict[int, float] = defaultdict(float)  # the same by replicate
        self.arrived: list[Bucket] = []  # buckets with new jobs since they were last looked at
        self.firsts = 0  # in the queues
        self.ordered = ordered  # whether some of the jobs are no firsts
        self.firsts_s = 0.0  # card-seconds of theirs
        self.too_much = False  # more than there is time for: short jobs go first
        self._by_firsts = _LazyMaxHeap(_firsts)
        self._by_demand = _LazyMaxHeap(_demand)
        self._unheld = _LazyMaxHeap(_unheld_work)
        self._drawn: dict[int, _LazyMaxHeap] = {}  # buckets that no worker serves, by replicate
        self._singles: list[tuple[bool, float, int, int, JobRecord]] = []  # longest first

    def load(self, records: Iterable[JobRecord]) -> None:
        """Add the jobs that a run starts with."""
        grouped: dict[tuple[int, str], list[JobRecord]] = {}
        for record in records:
            key = "" if record.width > 1 else self._bucket_key(record)
            grouped.setdefault((record.width, key), []).append(record)
        for (width, _), group in grouped.items():
            self._queue_of(group[0]).extend(group)
            for record in group:
                self._count_first(record, 1)
            self.card_seconds += width * sum(record.duration for record in group)
            if width == 1:
                self._singles += map(_single, group)
                self._changed(self._bucket_of(group[0]), arrived=True)
                self._count_single(group[0], sum(record.duration for record in group))
        heapify(self._singles)

    def push(self, record: JobRecord, *, arrived: bool = True) -> None:
        """Add one job; unless it has been here all along."""
        self.card_seconds += record.width * record.duration
        if record.particular:
            self.particular.setdefault(record.width, {})[record.job_id] = record
            self._apart_s[record.width] += record.duration
            return
        self._queue_of(record).push(record)
        self._count_first(record, 1)
        if record.width == 1:
            heappush(self._singles, _single(record))
            self._changed(self._bucket_of(record), arrived=arrived)
            self._count_single(record, record.duration)

    def take(self, record: JobRecord) -> JobRecord:
        """Remove a job from wherever it waits, and return it."""
        self.card_seconds -= record.width * record.duration
        apart = self.particular.get(record.width, {})
        if record.job_id in apart:
            del apart[record.job_id]
            left_s = self._apart_s[record.width] - record.duration
            self._apart_s[record.width] = left_s if apart else 0.0  # no rounding stays
            return record
        self._queue_of(record).discard(record)
        self._count_first(record, -1)
        if record.width == 1:
            self._changed(self._bucket_of(record))
            self._count_single(record, -record.duration)
        return record

    def reckon_anew(self, record: JobRecord, expect: Callable[[JobRecord], None]) -> None:
        """Let ``expect`` give a job that waits here another duration."""
        self.take(record)
        expect(record)
        self.push(record, arrived=False)
        if record.warm:
            self._bucket_of(record).load_s = record.load_s

    def widths(self) -> list[int]:
        """Widths of the gangs that wait, widest first."""
        queued = {width for width, queue in self.gangs.items() if len(queue)}
        queued |= {width for width, apart in self.particular.items() if width > 1 and apart}
        return sorted(queued, reverse=True)

    def best_for(self, width: int, cards: Iterable[Card], within_s: float) -> JobRecord | None:
        """The job to run on these cards, of at most ``within_s``; those that must avoid some
        card come first, since they have the fewest chances. One-card jobs are in buckets, so for
        them only the former are looked at."""
        cards = tuple(cards)
        for record in islice(self.particular.get(width, {}).values(), LOOK_AHEAD):
            if record.cold_s <= within_s and not any(map(record.avoids, cards)):
                return record
        queue = self.gangs.get(width)
        found = self.next_of(queue, within_s, cards) if queue is not None else None
        return self._in_turn(found)

    def next_of(
        self, queue: DurationQueue, within_s: float, cards: Iterable[Card] = ()
    ) -> JobRecord | None:
        """The job of this queue whose turn it is on these cards, of at most ``within_s``: longest
        first ends a run soonest, shortest first measures most where not all can be measured."""
        if self.too_much:
            return queue.shortest_within(within_s)
        return queue.longest_within(within_s, cards)

    def candidates(self, width: int, within_s: float = inf) -> list[JobRecord]:
        """The gangs of this width to look at, in the order of ``best_for``."""
        apart = islice(self.particular.get(width, {}).values(), LOOK_AHEAD)
        found = [record for record in apart if record.duration <= within_s]
        queue = self.gangs.get(width)
        gang = self._in_turn(self.next_of(queue, within_s)) if queue is not None else None
        return found if gang is None else [*found, gang]

    def _in_turn(self, gang: JobRecord | None) -> JobRecord | None:
        """Return the gang unless it must wait. Before a deadline, while there are firsts, a gang
        that is none of them would take their cards, since gangs go before one-card jobs."""
        held = gang is not None and gang.cautious and not gang.first and self.firsts
        return None if held else gang

    def gang_work(self, width: int) -> float:
        """Card-seconds of the gangs of this width that wait, also of those that avoid cards."""
        queue = self.gangs.get(width)
        return width * (self._apart_s[width] + (queue.work_s if queue is not None else 0.0))

    def longest_single(self) -> JobRecord | None:
        """The longest one-card job, whatever its key."""
        heap = self._singles
        while heap and (heap[0][3] != heap[0][4].token or heap[0][4].queue is None):
            heappop(heap)
        return heap[0][4] if heap else None

    def most_firsts(self) -> Bucket | None:
        """The most demanding bucket with firsts that no starting worker will take."""
        return self._by_firsts.top()

    def most_demanding(self) -> Bucket | None:
        """The bucket that would take longest even with one more worker."""
        return self._by_demand.top()

    def longest_unheld(self) -> Bucket | None:
        """The largest bucket that no worker serves."""
        return self._unheld.top()

    def next_drawn(self) -> list[Bucket]:
        """The next bucket of each replicate that no worker serves, in the order drawn; none in a
        run without replicates."""
        tops = (heap.top() for heap in self._drawn.values())
        return sorted((top for top in tops if top is not None), key=lambda bucket: -bucket.draw)

    def attach(self, worker: Worker, bucket: Bucket) -> None:
        """Count ``worker`` among those that serve ``bucket`` from now on."""
        self.detach(worker)
        worker.bucket = bucket
        bucket.workers[worker.worker_id] = self.staff[worker.worker_id] = worker
        bucket.starting += worker.state is WorkerState.STARTING
        self.starting += worker.state is WorkerState.STARTING
        self._changed(bucket)

    def started(self, worker: Worker) -> None:
        """A worker is up; its state is still the old one."""
        if worker.bucket is not None:
            worker.bucket.starting -= 1
            self.starting -= 1
            self._changed(worker.bucket)

    def detach(self, worker: Worker) -> None:
        """The worker serves no bucket any more."""
        bucket = worker.bucket
        if bucket is not None:
            del bucket.workers[worker.worker_id], self.staff[worker.worker_id]
            bucket.starting -= worker.state is WorkerState.STARTING
            self.starting -= worker.state is WorkerState.STARTING
            worker.bucket = None
            self._changed(bucket)

    def some_buckets(self, first: Bucket | None) -> Iterator[Bucket]:
        """Buckets of warm jobs worth a look for a gap: this one, then a few others."""
        others = (self.most_demanding(), self.longest_unheld())
        for bucket in (first, *others, *islice(self.buckets.values(), LOOK_AHEAD)):
            if bucket is not None and bucket.key != FRESH and len(bucket.queue):
                yield bucket

    def _bucket_key(self, record: JobRecord) -> str:
        return record.key if record.warm else FRESH

    def _bucket_of(self, record: JobRecord) -> Bucket:
        """The bucket of a job, made when it is new."""
        key = self._bucket_key(record)
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self.buckets[key] = Bucket(key, record.load_s)
            if self.seed is not None and key != FRESH:
                bucket.replicate = record.job.replicate
                bucket.draw = drawn(self.seed, key)
        return bucket

    def _queue_of(self, record: JobRecord) -> DurationQueue:
        if record.width > 1:
            return self.gangs.setdefault(record.width, DurationQueue())
        return self._bucket_of(record).queue

    def _count_first(self, record: JobRecord, sign: int) -> None:
        if record.first:
            self.firsts += sign
            self.firsts_s += sign * record.width * record.duration

    def _count_single(self, record: JobRecord, seconds: float) -> None:
        if record.warm:
            self.single_work_s += seconds
            self.work_s_of[record.job.replicate] += seconds

    def _changed(self, bucket: Bucket, *, arrived: bool = False) -> None:
        if arrived:
            self.arrived.append(bucket)
        self._by_demand.update(bucket)
        if self.ordered:
            self._by_firsts.update(bucket)
        self._unheld.update(bucket)
        if self.seed is not None and bucket.key != FRESH:
            self._drawn.setdefault(bucket.replicate, _LazyMaxHeap(_draw)).update(bucket)


def _single(record: JobRecord) -> tuple[bool, float, int, int, JobRecord]:
    return (not record.first, -record.duration, record.order, record.token, record)


def needed(jobs: Iterable[PlannedJob]) -> frozenset[str]:
    """Ids of jobs that others wait for. They go first: until they have ended, the schedule has
    less to choose from, and a gang that is held back by a short job would come last."""
    return frozenset(
        each
        for planned in jobs
        if planned.action is Action.RUN
        for each in (*planned.needs, *planned.after)
    )


class Needs:
    """Knows who is held back by whom. Jobs outside of any need cost nothing."""

    def __init__(self, jobs: Sequence[PlannedJob], records: Iterable[JobRecord]) -> None:
        by_id = {record.job_id: record for record in records}
        self._missing: dict[str, set[str]] = {}  # held job -> what it still needs
        self._waiting_for: dict[str, list[JobRecord]] = {}  # needed job -> held ones
        #: Jobs that can never start, and why; known before anything has run.
        self.hopeless: list[tuple[JobRecord, str]] = []
        self._only_after: set[tuple[str, str]] = set()  # held job, job that it comes after
        if not any(planned.needs or planned.after for planned in jobs):
            return
        planned_by_id: dict[str, PlannedJob] = {}
        for planned in jobs:
            planned_by_id.setdefault(planned.job.job_id, planned)
        for job_id, planned in planned_by_id.items():
            record = by_id.get(job_id)
            wanted = [] if record is None else list(dict.fromkeys(planned.needs))
            others = {each: planned_by_id.get(each) for each in wanted}
            missing = {e for e, o in others.items() if o is None or o.action is not Action.REUSE}
            after = {e for e in planned.after if e in by_id and e not in others}
            if record is None or not (missing or after):
                continue
            self._only_after |= {(job_id, each) for each in after}
            wanted += sorted(after)
            missing |= after
            record.phase = Phase.HELD
            self._missing[job_id] = missing
            for each in wanted:
                if each in by_id and each in missing:
                    self._waiting_for.setdefault(each, []).append(record)
            never = [each for each in wanted if each in missing and each not in by_id]
            if never:
                self.hopeless.append((record, _why(never[0], others[never[0]])))
        self._find_circles(by_id)

    def ended(self, record: JobRecord, reason: str) -> list[tuple[JobRecord, str]]:
        """A job has its final row: those that need it, each with why it can never start, or with
        nothing when it may start now."""
        found = []
        for held in self._waiting_for.pop(record.job_id, ()):
            missing = self._missing[held.job_id]
            missing.discard(record.job_id)
            comes_after = (held.job_id, record.job_id) in self._only_after
            if record.state is not State.SUCCEEDED and not comes_after:
                about = f": {reason}" if reason else ""
                why = f"needs job {record.job_id}, which ended as {record.state}{about}"
                found.append((held, why))
            elif not missing:
                found.append((held, ""))
        return [(held, why) for held, why in found if held.phase is Phase.HELD]

    def _find_circles(self, by_id: dict[str, JobRecord]) -> None:
        """Jobs that wait for each other would wait for ever."""
        left = {job_id: set(missing) & by_id.keys() for job_id, missing in self._missing.items()}
        free = deque(job_id for job_id in by_id if not left.get(job_id))
        while free:
            job_id = free.popleft()
            for held in self._waiting_for.get(job_id, ()):
                left[held.job_id].discard(job_id)
                if not left[held.job_id]:
                    free.append(held.job_id)
        known = {record.job_id for record, _ in self.hopeless}
        for job_id, missing in left.items():
            if missing and job_id not in known:
                why = f"needs job {min(missing)}, and jobs that need each other can never start"
                self.hopeless.append((by_id[job_id], why))


def _why(job_id: str, planned: PlannedJob | None) -> str:
    if planned is None:
        return f"needs job {job_id}, which is not part of this run"
    if planned.action is Action.SKIP:
        return f"needs job {job_id}, which is not run: {planned.reason}"
    return f"needs job {job_id}, which is {planned.action}: {planned.reason}"
