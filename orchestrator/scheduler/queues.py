"""Queues of jobs that wait for cards or for other jobs.

Gangs wait by width, one-card jobs in a bucket per residency key (jobs with processes of their own
share one), jobs that must avoid some card apart. Queues are longest first, but *firsts* come before
others: the jobs that others wait for, or with a deadline the anchors (``deadline.py``).

``replicates: N`` runs a job in N processes, since memory layout, autotuned kernels and clocks do
not vary within one. To keep replicates independent, a process serves one replicate number; the
order of models, and of cells within a model, is drawn from the run's seed (a randomised block
design: R. A. Fisher, The Design of Experiments, 1935), so drift falls on no cell alone; and a cell
goes to a card that is new to it, if there is one.
"""

from __future__ import annotations

import contextlib
import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from heapq import nlargest
from itertools import islice
from math import inf

from orchestrator.core.job import Job, State
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Card
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.state import JobState, Phase, Worker, WorkerState


def drawn(seed: int, name: str) -> float:
    """Draw from 0 to 1 by seed and name alone, so a resumed run draws the same order."""
    digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def replicated_cells(jobs: Iterable[Job]) -> frozenset[str]:
    """Ids of the cells that have more than one replicate."""
    return frozenset(job.cell_id for job in jobs if job.replicate > 1)


#: Jobs or buckets considered for one card if some suit it better.
LOOK_AHEAD = 32


class DurationQueue:
    """Jobs by duration or draw, firsts before others; of equals the smaller batch first, since
    its failure prunes the larger."""

    def __init__(self) -> None:
        #: Firsts by duration, firsts as drawn, and the others alike; each ascending.
        self._lists: tuple[list[JobState], ...] = ([], [], [], [])
        self.firsts = 0  # how many are firsts
        self.work_s = 0.0  # sum of durations

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    def push(self, record: JobState) -> None:
        """Add one job."""
        insort(self._list_of(record), record, key=_rank)
        self._count(record, 1)

    def discard(self, record: JobState) -> None:
        """Remove a job."""
        records = self._list_of(record)
        at = bisect_left(records, _rank(record), key=_rank)
        if at == len(records) or records[at] is not record:
            raise ValueError(f"{record.job_id} does not wait in this queue")
        del records[at]
        self._count(record, -1)

    def longest(self) -> JobState | None:
        """Peek at the longest job, or the next as drawn."""
        return next((records[-1] for records in self._lists if records), None)

    def longest_within(self, seconds: float, cards: Iterable[Card] = ()) -> JobState | None:
        """Peek at the longest job of at most ``seconds``; of replicates at the next one, if
        possible one that has not been on any of these cards."""
        for timed, drawn_ones in (self._lists[:2], self._lists[2:]):
            if at := bisect_right(timed, seconds, key=_duration):
                return timed[at - 1]
            short = (record for record in reversed(drawn_ones) if record.duration <= seconds)
            few = list(islice(short, LOOK_AHEAD))
            if few:
                new = (record for record in few if record.cell_cards.isdisjoint(cards))
                return next(new, few[0])
        return None

    def shortest_within(self, seconds: float) -> JobState | None:
        """Peek at the shortest job, if of at most ``seconds``."""
        for records in self._lists:
            record = min(records, key=_duration, default=None) if records else None
            if record is not None and record.duration <= seconds:
                return record
        return None

    def _list_of(self, record: JobState) -> list[JobState]:
        return self._lists[2 * (not record.first) + (record.draw is not None)]

    def _count(self, record: JobState, sign: int) -> None:
        self.firsts += sign * record.first
        self.work_s = max(0.0, self.work_s + sign * record.duration) if len(self) else 0.0


def _rank(record: JobState) -> tuple[float, int, int]:
    place = record.duration if record.draw is None else record.draw
    return (place, -record.batch_size, -record.order)


def _duration(record: JobState) -> float:
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
    starting: int = 0  # of the workers; each will take a job

    @property
    def urgency(self) -> tuple[float, bool, float]:
        """Sort key for one more worker: draw, firsts, time of the jobs with one more worker."""
        draw = 0.0 if self.workers else self.draw
        firsts = self.queue.firsts > self.starting
        return (draw, firsts, self.queue.work_s / (len(self.workers) + 1))


class PendingJobs:
    """Every waiting job for one kind of accelerator."""

    def __init__(self, *, seed: int | None = None) -> None:
        self.seed = seed  # draws the order of a run that has replicates; None: it has none
        self.gangs: dict[int, DurationQueue] = {}  # by width, all above 1
        self.buckets: dict[str, Bucket] = {}  # those with jobs or workers
        #: By width, the jobs that must avoid some card, in the order in which they came.
        self.particular: dict[int, dict[str, JobState]] = {}
        self.card_seconds = 0.0  # of all that wait
        self.firsts = 0
        self.firsts_s = 0.0  # their card-seconds
        self.too_much = False  # not all can be measured before the deadline

    def push(self, record: JobState) -> None:
        """Add one job."""
        if record.avoided:
            self.particular.setdefault(record.width, {})[record.job_id] = record
        else:
            self._queue_of(record).push(record)
        self._count(record, 1)

    def take(self, record: JobState) -> JobState:
        """Remove a job from wherever it waits, and return it."""
        if self.particular.get(record.width, {}).pop(record.job_id, None) is None:
            self._queue_of(record).discard(record)
            self._drop_if_empty(_bucket_key(record))
        self._count(record, -1)
        return record

    def reestimate(self, record: JobState, estimate: Estimate) -> None:
        """Give a job that waits here another estimate."""
        self.take(record)
        record.expect(estimate)
        self.push(record)
        if record.warm and record.width == 1 and not record.avoided:
            self.buckets[_bucket_key(record)].load_s = record.load_s

    def widths(self) -> list[int]:
        """Widths of the gangs that wait, that of the longest job first."""
        waiting = {width for width, queue in self.gangs.items() if len(queue)}
        waiting |= {width for width, apart in self.particular.items() if width > 1 and apart}
        return sorted(waiting, key=lambda width: (self.turn_of(width), width), reverse=True)

    def best_for(self, width: int, cards: Iterable[Card], within_s: float) -> JobState | None:
        """The job of at most ``within_s`` to run on these cards; jobs that must avoid some card
        come first, and are the only one-card jobs considered (others are in buckets)."""
        cards = tuple(cards)
        for record in islice(self.particular.get(width, {}).values(), LOOK_AHEAD):
            if record.cold_s <= within_s and not any(map(record.avoids, cards)):
                return record
        queue = self.gangs.get(width)
        return self.next_of(queue, within_s, cards) if queue is not None else None

    def next_of(
        self, queue: DurationQueue, within_s: float, cards: Iterable[Card] = ()
    ) -> JobState | None:
        """The next job of at most ``within_s`` for these cards: the longest, or the shortest if not
        all can be measured in time."""
        if self.too_much:
            return queue.shortest_within(within_s)
        return queue.longest_within(within_s, cards)

    def candidates(self, width: int, within_s: float = inf) -> list[JobState]:
        """The gangs of this width to look at, in the order of ``best_for``."""
        apart = islice(self.particular.get(width, {}).values(), LOOK_AHEAD)
        gangs = [record for record in apart if record.duration <= within_s]
        queue = self.gangs.get(width)
        gang = self.next_of(queue, within_s) if queue is not None else None
        return gangs if gang is None else [*gangs, gang]

    def is_turn_of(self, width: int) -> bool:
        """Return whether the next gang of this width comes before every one-card job."""
        singles = (bucket.queue.longest() for bucket in self.buckets.values())
        return self.turn_of(width) >= max(map(_turn, singles), default=(False, 0.0))

    def turn_of(self, width: int) -> tuple[bool, float]:
        """The rank of the next gang of this width among all that wait: is it a first, and long."""
        return max(map(_turn, self.candidates(width)), default=(False, 0.0))

    def short_buckets(self) -> list[Bucket]:
        """The buckets with more jobs than workers that start for them, the most urgent first."""
        short = [bucket for bucket in self.buckets.values() if len(bucket.queue) > bucket.starting]
        return nlargest(LOOK_AHEAD, short, key=lambda bucket: bucket.urgency)

    def attach(self, worker: Worker, bucket: Bucket) -> None:
        """Count ``worker`` among those that serve ``bucket`` from now on."""
        if worker.bucket is bucket:
            return
        self.detach(worker)
        worker.bucket = bucket
        bucket.workers[worker.worker_id] = worker
        bucket.starting += worker.state is WorkerState.STARTING

    def detach(self, worker: Worker) -> None:
        """Remove a worker from its bucket."""
        bucket = worker.bucket
        if bucket is not None:
            del bucket.workers[worker.worker_id]
            bucket.starting -= worker.state is WorkerState.STARTING
            worker.bucket = None
            self._drop_if_empty(bucket.key)

    def _drop_if_empty(self, key: str) -> None:
        bucket = self.buckets.get(key)
        if bucket is not None and not len(bucket.queue) and not bucket.workers:
            del self.buckets[key]

    def _queue_of(self, record: JobState) -> DurationQueue:
        if record.width > 1:
            return self.gangs.setdefault(record.width, DurationQueue())
        key = _bucket_key(record)
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self.buckets[key] = Bucket(key, record.load_s)
            if self.seed is not None and key != FRESH:
                bucket.replicate = record.job.replicate
                bucket.draw = drawn(self.seed, key)
        return bucket.queue

    def _count(self, record: JobState, sign: int) -> None:
        card_seconds = sign * record.width * record.duration
        self.card_seconds += card_seconds
        if record.first:
            self.firsts += sign
            self.firsts_s += card_seconds


def _bucket_key(record: JobState) -> str:
    return record.key if record.warm else FRESH


def _turn(record: JobState | None) -> tuple[bool, float]:
    """Sort key of jobs that compete for cards: firsts first, and the longest first."""
    return (record.first, record.duration) if record is not None else (False, 0.0)


def needed(jobs: Iterable[PlannedJob]) -> frozenset[str]:
    """Ids of jobs that others wait for; they go first, else a gang that waits for a short job
    would come last."""
    running = [planned for planned in jobs if planned.action is Action.RUN]
    return frozenset(job_id for planned in running for job_id in (*planned.needs, *planned.after))


class Dependencies:
    """Dependencies between jobs."""

    def __init__(self, jobs: Sequence[PlannedJob], records: Mapping[str, JobState]) -> None:
        self._missing: dict[str, set[str]] = {}  # blocked job -> what it still waits for
        #: Job -> those that wait for it, and whether they need its success.
        self._blocked_by: dict[str, list[tuple[JobState, bool]]] = {}
        #: Jobs that can never start, and why; known before anything has run.
        self.hopeless: list[tuple[JobState, str]] = []
        planned_by_id: dict[str, PlannedJob] = {}
        for planned in jobs:
            planned_by_id.setdefault(planned.job.job_id, planned)
        reused = {i for i, planned in planned_by_id.items() if planned.action is Action.REUSE}
        for job_id, planned in planned_by_id.items():
            record = records.get(job_id)
            needs = [needed for needed in dict.fromkeys(planned.needs) if needed not in reused]
            after = sorted({i for i in planned.after if i in records and i not in planned.needs})
            if record is None or not (needs or after):
                continue
            record.phase = Phase.HELD
            self._missing[job_id] = {*needs, *after}
            for other in [*needs, *after]:
                if other in records:
                    self._blocked_by.setdefault(other, []).append((record, other in needs))
            never = [needed for needed in needs if needed not in records]
            if never:
                self.hopeless.append((record, _why(never[0], planned_by_id.get(never[0]))))
        self._find_circles(records)

    def ended(self, record: JobState, reason: str) -> list[tuple[JobState, str]]:
        """Dependents of an ended job, each with why it can never start, or "" if it may start."""
        decided = []
        for blocked, needs_it in self._blocked_by.pop(record.job_id, ()):
            missing = self._missing[blocked.job_id]
            missing.discard(record.job_id)
            if blocked.phase is not Phase.HELD:
                continue
            if needs_it and record.state is not State.SUCCEEDED:
                about = f": {reason}" if reason else ""
                why = f"needs job {record.job_id}, which ended as {record.state}{about}"
                decided.append((blocked, why))
            elif not missing:
                decided.append((blocked, ""))
        return decided

    def _find_circles(self, records: Mapping[str, JobState]) -> None:
        sorter = TopologicalSorter({i: ids & records.keys() for i, ids in self._missing.items()})
        with contextlib.suppress(CycleError):
            sorter.prepare()
        free: set[str] = set()
        while ready := sorter.get_ready():  # all but those in a circle, or behind one
            free.update(ready)
            sorter.done(*ready)
        known = free.union(record.job_id for record, _ in self.hopeless)
        for job_id, missing in self._missing.items():
            if job_id not in known:
                needed = min(missing & records.keys() - free)
                why = f"needs job {needed}, and jobs that need each other can never start"
                self.hopeless.append((records[job_id], why))


def _why(job_id: str, planned: PlannedJob | None) -> str:
    if planned is None:
        return f"needs job {job_id}, which is not part of this run"
    if planned.action is Action.SKIP:
        return f"needs job {job_id}, which is not run: {planned.reason}"
    return f"needs job {job_id}, which is {planned.action}: {planned.reason}"
