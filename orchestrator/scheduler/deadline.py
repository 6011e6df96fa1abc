"""Effects of a deadline on the schedule: what goes first, what is given up, and learning.

A *configuration* is everything that a row can win by: model, workload, dataset, precision, engine,
accelerator, number of cards and techniques. Its cells differ in *sizes*: the batch size and the
lengths. One of them is its *anchor*: the sizes that most configurations of the grid have in common,
so that their anchors can be compared, and of those the middle ones. Anchors go first in a night
that may end before the grid does.

A job whose latest start has gone by is given up while it waits: keeping it would keep the run open
for nothing. Estimates are corrected by what the run itself measures, since on a first night there
is nothing else to go by, and a wrong one either wastes the end of the night or runs into it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf

from orchestrator.core.events import Command
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import Outcome
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.scheduler.leases import Lease
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.pool import Pool
from orchestrator.scheduler.state import (
    Estimates,
    JobState,
    LearningEstimates,
    Phase,
    configuration_of,
)
from workloads import registry

_Sizes = tuple[bool, int, tuple[tuple[str, float], ...]]


def anchors(planned: Sequence[PlannedJob]) -> frozenset[str]:
    """Ids of the jobs to run first: an anchor for each configuration that has no measured cell
    yet, and what the anchors need. Only jobs that the plan runs are named."""
    to_run = {each.job.job_id: each for each in planned if each.action is Action.RUN}
    begun = {_configuration(p.job) for p in planned if p.action is Action.REUSE}
    cells: dict[Job, list[Job]] = defaultdict(list)
    for each in to_run.values():
        if each.job.replicate == 1:  # others refine what is known already
            cells[_configuration(each.job)].append(each.job)
    common = Counter(sizes for group in cells.values() for sizes in set(map(_sizes, group)))
    chosen = {
        _anchor(group, common).job_id
        for configuration, group in cells.items()
        if configuration not in begun
    }
    return frozenset(_with_needs(chosen, to_run))


def _anchor(cells: Iterable[Job], common: Counter[_Sizes]) -> Job:
    """The cell with the commonest sizes; of several the (lower) middle one."""
    known = [(_sizes(cell), cell.job_id, cell) for cell in cells]
    fixed = [entry for entry in known if not entry[0][0]] or known
    most = max(common[sizes] for sizes, _, _ in fixed)
    best = sorted(entry[:2] for entry in fixed if common[entry[0]] == most)
    middle = best[(len(best) - 1) // 2]
    return next(cell for sizes, job_id, cell in fixed if (sizes, job_id) == middle)


def _configuration(job: Job) -> Job:
    lengths = _lengths(job)
    techniques = tuple(pair for pair in job.parameters if pair[0] not in lengths)
    return replace(configuration_of(job), parameters=techniques)


def _lengths(job: Job) -> frozenset[str]:
    """The workload's settings that say how much is done. All others tell configurations apart."""
    declared = registry.declared(job.workload, job.engine)
    return frozenset(name for name, declaration in declared.items() if declaration.length)


def _sizes(job: Job) -> _Sizes:
    """Sort key of a job's sizes: searched or not, the batch size, and the lengths in an order in
    which sizes grow. A length that the job does not set counts as the shortest."""
    searched = not isinstance(job.batch_size, int)
    known = _lengths(job)
    lengths = [
        (name, float(value) if isinstance(value, int | float) else 0.0)
        for name, value in job.parameters
        if name in known
    ]
    return (searched, 0 if searched else int(job.batch_size), tuple(lengths))


def _with_needs(job_ids: set[str], planned: dict[str, PlannedJob]) -> set[str]:
    """These jobs and all that they wait for."""
    found: set[str] = set()
    todo = sorted(job_ids)
    while todo:
        job_id = todo.pop()
        if job_id in planned and job_id not in found:
            found.add(job_id)
            todo += (*planned[job_id].needs, *planned[job_id].after)
    return found


class LatestStarts:
    """The latest start of each job that lets it end by ``work_until``."""

    def __init__(self, records: Iterable[JobState], work_until: float) -> None:
        self._work_until = work_until
        self._count = 0
        self._due = [] if work_until == inf else [self._entry(record) for record in records]
        heapify(self._due)
        self._running: dict[str, JobState] = {}  # were in time; given up should they fail

    @property
    def next_at(self) -> float:
        """The earliest latest start of all waiting jobs."""
        return self._due[0][0] if self._due else inf

    def move(self, work_until: float) -> None:
        """The end of the time is another one."""
        self._work_until = work_until
        self._due = [self._entry(record) for _, _, record in self._due]
        heapify(self._due)

    def changed(self, record: JobState) -> None:
        """The job is expected to last longer or shorter than before."""
        heappush(self._due, self._entry(record))

    def gone_by(self, now: float, running: Callable[[JobState], bool]) -> list[JobState]:
        """Jobs that have not ended, do not run, and could not end in time any more."""
        found: dict[str, JobState] = {}  # an entry may be there twice
        for job_id, record in list(self._running.items()):
            if not running(record):
                del self._running[job_id]
                heappush(self._due, self._entry(record))
        while self._due and self._due[0][0] < now:
            record = heappop(self._due)[2]
            if record.phase is Phase.DONE:
                continue
            again = self._entry(record)
            if again[0] >= now:  # it needs less than it did
                heappush(self._due, again)
            elif running(record):
                self._running[record.job_id] = record
            else:
                found[record.job_id] = record
        return list(found.values())

    def _entry(self, record: JobState) -> tuple[float, int, JobState]:
        self._count += 1
        return (self._work_until - record.next_s, self._count, record)


class Learning:
    """Corrects the estimates of jobs that wait, by those that are done.

    All jobs of one model are looked at again after 1, 2, 4, 8, … of them are measured: most is
    learnt from the first, and the whole costs no more than sorting them.
    """

    def __init__(self, records: Iterable[JobState], estimates: Estimates) -> None:
        self._estimates = estimates if isinstance(estimates, LearningEstimates) else None
        self._alike: dict[tuple[str, str, Accelerator], list[JobState]] = {}
        self._measured: dict[tuple[str, str, Accelerator], int] = {}
        if self._estimates is not None:
            for record in records:
                self._alike.setdefault(_model(record), []).append(record)

    def learn(self, lease: Lease, outcome: Outcome) -> list[JobState]:
        """A job was measured; the jobs whose estimates may be other ones by now."""
        if self._estimates is None:
            return []
        record = lease.record
        results = [rank.result for rank in outcome.ranks if rank.result is not None]
        busy_s = max((rank.ended_at - rank.started_at for rank in outcome.ranks), default=0.0)
        load_s = lease.lasts_s - record.estimate.run_s  # as expected; 0 if it was loaded
        if results:
            load_s = max(result.load_s or 0.0 for result in results)
        run_s = max(0.0, busy_s - load_s)
        self._estimates.learn(record.job_id, lease.attempt.job, load_s=load_s, run_s=run_s)
        model = _model(record)
        measured = self._measured[model] = self._measured.get(model, 0) + 1
        return self._alike[model] if measured & (measured - 1) == 0 else []

    def expect(self, record: JobState) -> None:
        """Give a job that waits in no queue the estimate of now."""
        assert self._estimates is not None
        record.expect(self._estimates.estimate(record.job))


class Deadline:
    """Keeps no job waiting that could not end in time, by the best estimates there are."""

    def __init__(
        self,
        records: Collection[JobState],
        estimates: Estimates,
        pools: Mapping[Accelerator, Pool],
        ledger: Ledger,
    ) -> None:
        until = ledger.work_until
        self._latest = LatestStarts(records, until)
        self._learning = Learning(records, estimates) if until < inf else None
        self._pools, self._ledger = pools, ledger

    @property
    def next_at(self) -> float:
        """Time at which the next latest start of a job comes."""
        return self._latest.next_at

    def move(self, work_until: float) -> None:
        """Count the time left anew: the end of the time is another one."""
        self._ledger.work_until = work_until
        self._latest.move(work_until)
        for pool in self._pools.values():
            pool.placement.work_until = work_until
            pool.cards.touch_all()  # more may fit, or less

    def give_up_late(self) -> Iterator[Command]:
        """Give up what could not end in time any more."""
        now, until = self._ledger.now, self._ledger.work_until
        for record in self._latest.gone_by(now, self._is_running):
            pool = self._pools[record.job.accelerator]
            tried = f" after {record.number} attempts" if record.failures else ""
            reason = (
                f"too late to start{tried}: it takes about {record.estimate.total_s:.0f} s, with "
                f"caution {record.duration:.0f} s, and {until - now:.0f} s are left before the "
                "deadline"
            )
            yield from self._ledger.end_unrun(pool, record, State.NOT_STARTED, reason)

    def learn(self, lease: Lease, outcome: Outcome) -> None:
        """Correct the estimates of jobs that wait by those of one that was measured."""
        if self._learning is None:
            return
        for record in self._learning.learn(lease, outcome):
            if record.phase in (Phase.DONE, Phase.LEASED) or record.reservation is not None:
                continue
            if record.phase is Phase.WAITING:
                pending = self._pools[record.job.accelerator].pending
                pending.reestimate(record, self._learning.expect)
            else:
                self._learning.expect(record)
            self._latest.changed(record)
        for pool in self._pools.values():
            pool.cards.touch_all()  # a gang may fit now

    def _is_running(self, record: JobState) -> bool:
        lease = self._pools[record.job.accelerator].lease_of(record)
        return lease is not None and lease.running


def _model(record: JobState) -> tuple[str, str, Accelerator]:
    return (record.job.workload, record.job.model, record.job.accelerator)
