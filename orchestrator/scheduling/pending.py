"""Jobs that wait for cards, kept so that each decision costs the same however many there are.

Gangs wait by width. One-card jobs wait in a bucket per residency key, since a worker that holds
the model should take the next of the same key; jobs that need a process of their own share one
bucket. Jobs that must avoid some card after a failure wait apart. Every queue is longest first.

Where some jobs are *firsts*, a queue gives them out before the others. Without a deadline they are
those that others wait for (``needs.py``); with one, those that tell most (``anchors.py``), and then
gangs that are none wait for firsts of every width.

Replicates wait in buckets of their own, by residency key and number (``replicates.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from orchestrator.core.topology import Card
from orchestrator.scheduling.cards import Worker, WorkerState
from orchestrator.scheduling.queue import LOOK_AHEAD, DurationQueue
from orchestrator.scheduling.record import JobRecord
from orchestrator.scheduling.replicates import drawn

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
