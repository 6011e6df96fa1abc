"""Effects of a deadline on the schedule: anchors first, late jobs given up, estimates corrected.

A *configuration* is a job less its *sizes* (batch size and lengths). Its *anchor* is the cell with
the sizes that most configurations share, so that anchors can be compared; of several the middle
one. Anchors go first, since the night may end before the grid does. A waiting job is given up once
its latest start has passed. Estimates are corrected by what the run measures.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import Outcome
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.scheduler.batch_size import configuration_of
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.pool import Pool
from orchestrator.scheduler.state import Estimates, JobState, LearningEstimates, Lease, Phase
from workloads import registry

_Sizes = tuple[bool, int, tuple[tuple[str, float], ...]]


def anchors(planned: Sequence[PlannedJob]) -> frozenset[str]:
    """Ids of planned jobs to run first: anchors of configurations without a measured cell, and
    what they need."""
    to_run = {item.job.job_id: item for item in planned if item.action is Action.RUN}
    measured = {_configuration(p.job) for p in planned if p.action is Action.REUSE}
    cells: dict[Job, list[Job]] = defaultdict(list)
    for item in to_run.values():
        if item.job.replicate == 1:  # others refine what is known already
            cells[_configuration(item.job)].append(item.job)
    common = Counter(sizes for group in cells.values() for sizes in set(map(_sizes, group)))
    todo = sorted(
        _anchor(group, common).job_id
        for configuration, group in cells.items()
        if configuration not in measured
    )
    firsts: set[str] = set()
    while todo:
        job_id = todo.pop()
        if job_id in to_run and job_id not in firsts:
            firsts.add(job_id)
            todo += (*to_run[job_id].needs, *to_run[job_id].after)
    return frozenset(firsts)


def _anchor(cells: Iterable[Job], common: Counter[_Sizes]) -> Job:
    """The cell with the commonest sizes; of several the (lower) middle one."""
    sizes = {cell: _sizes(cell) for cell in cells}
    fixed = [cell for cell, (searched, *_) in sizes.items() if not searched] or list(sizes)
    most = max(common[sizes[cell]] for cell in fixed)
    best = [cell for cell in fixed if common[sizes[cell]] == most]
    best.sort(key=lambda cell: (sizes[cell], cell.job_id))
    return best[(len(best) - 1) // 2]


def _configuration(job: Job) -> Job:
    lengths = _lengths(job)
    techniques = tuple(pair for pair in job.parameters if pair[0] not in lengths)
    return replace(configuration_of(job), parameters=techniques)


def _lengths(job: Job) -> frozenset[str]:
    """Workload settings that are sizes; all others distinguish configurations."""
    declared = registry.declared(job.workload, job.engine)
    return frozenset(name for name, declaration in declared.items() if declaration.length)


def _sizes(job: Job) -> _Sizes:
    """Sort key of a job's sizes, ascending: searched, batch size, lengths (unset: shortest)."""
    searched = not isinstance(job.batch_size, int)
    known = _lengths(job)
    lengths = [
        (name, float(value) if isinstance(value, int | float) else 0.0)
        for name, value in job.parameters
        if name in known
    ]
    return (searched, 0 if searched else int(job.batch_size), tuple(lengths))


class Deadline:
    """Gives up waiting jobs that can no longer end in time. All jobs of a model are re-estimated
    after 1, 2, 4, 8, … of them, so the total cost stays that of a sort."""

    def __init__(
        self,
        records: Collection[JobState],
        estimates: Estimates,
        pools: Mapping[Accelerator, Pool],
        ledger: Ledger,
    ) -> None:
        self._pools, self._ledger = pools, ledger
        self._estimates = estimates if isinstance(estimates, LearningEstimates) else None
        self._exists = ledger.work_until < inf
        self._count = 0
        #: By the latest start that lets a job end in time; a job may be there twice.
        self._latest: list[tuple[float, int, JobState]] = []
        self._running: dict[str, JobState] = {}  # were in time; given up should they fail
        self._alike: dict[_Model, list[JobState]] = defaultdict(list)
        self._measured: Counter[_Model] = Counter()
        for record in records if self._exists else ():
            self.watch(record)
            self._alike[_model(record)].append(record)

    @property
    def next_at(self) -> float:
        """Earliest of the jobs' latest starts."""
        return self._latest[0][0] if self._latest else inf

    def move(self, work_until: float) -> None:
        """Set another end of work, and recompute the latest starts."""
        self._ledger.work_until = work_until
        entries, self._latest = self._latest, []
        for _, _, record in entries:
            self.watch(record)
        for pool in self._pools.values():
            pool.touch_all()  # more may fit, or less

    def watch(self, record: JobState) -> None:
        """Give up a job, while it waits, once it can no longer end in time."""
        if self._exists:
            self._count += 1
            latest = self._ledger.work_until - record.next_s
            heappush(self._latest, (latest, self._count, record))

    def give_up_late(self) -> None:
        """Give up jobs that can no longer end in time."""
        now, until = self._ledger.now, self._ledger.work_until
        for record in [record for record in self._running.values() if not record.running]:
            del self._running[record.job_id]
            self.watch(record)
        late: dict[str, JobState] = {}
        while self.next_at < now:
            record = heappop(self._latest)[2]
            if record.phase is Phase.DONE:
                continue
            if until - record.next_s >= now:  # it needs less than it did
                self.watch(record)
            elif record.running:
                self._running[record.job_id] = record
            else:
                late[record.job_id] = record
        for record in late.values():
            tried = f" after {record.number} attempts" if record.failures else ""
            reason = (
                f"too late to start{tried}: it takes about {record.estimate.total_s:.0f} s, with "
                f"caution {record.duration:.0f} s, and {until - now:.0f} s are left before the "
                "deadline"
            )
            self._ledger.end_unrun(record, State.NOT_STARTED, reason)

    def learn(self, lease: Lease, outcome: Outcome) -> None:
        """Correct the estimates of waiting jobs by a measured one."""
        record, estimates = lease.record, self._estimates
        if not self._exists:
            return
        for pool in self._pools.values():
            pool.touch_all()  # a gang may fit now
        if estimates is None:
            return
        results = [rank.result for rank in outcome.ranks if rank.result is not None]
        busy_s = max((rank.ended_at - rank.started_at for rank in outcome.ranks), default=0.0)
        load_s = lease.lasts_s - record.estimate.run_s  # as expected; 0 if it was loaded
        if results:
            load_s = max(result.load_s or 0.0 for result in results)
        run_s = max(0.0, busy_s - load_s)
        estimates.learn(record.job_id, lease.attempt.job, load_s=load_s, run_s=run_s)
        self._measured[_model(record)] += 1
        measured = self._measured[_model(record)]
        if measured & (measured - 1):
            return
        for other in self._alike[_model(record)]:
            if other.phase in (Phase.DONE, Phase.LEASED) or other.reservation is not None:
                continue
            estimate = estimates.estimate(other.job)
            if other.phase is Phase.WAITING:
                other.pool.pending.reestimate(other, estimate)
            else:
                other.expect(estimate)
            self.watch(other)


_Model = tuple[str, str, Accelerator]


def _model(record: JobState) -> _Model:
    return (record.job.workload, record.job.model, record.job.accelerator)
