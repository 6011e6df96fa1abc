"""A discrete-event run of the same ``Schedule`` that runs the night, with seeded faults.

Nothing is measured and no time passes (``virtual_cluster.py``). Every command is checked
(``invariants.py``). The result compares the makespan with a bound that no schedule can beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from orchestrator.core.events import Event, NodeJoined, RecordRow, Tick
from orchestrator.core.job import Job
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.scheduling.estimate import Estimate
from orchestrator.scheduling.record import Estimates, LearningEstimates
from orchestrator.scheduling.schedule import Schedule, ScheduleSettings
from orchestrator.scheduling.virtual_chance import Faults, SimulationSettings
from orchestrator.scheduling.virtual_cluster import VirtualCluster

__all__ = ["Faults", "SimulationResult", "SimulationSettings", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Outcome of a simulated run."""

    makespan_s: float  # until the last row
    work_bound_s: float  # card-seconds of running over cards, or the longest job
    bound_s: float  # the same with what a gang must pay: fresh processes that load the model
    busy_fraction: float  # of card-time, that attempts had
    start_fraction: float  # of card-time, that workers were starting
    events: int
    commands: int
    workers: int
    attempts: int
    faults: int
    rows: tuple[RecordRow, ...]  # final ones
    #: By job id: from the start of the last of its last attempt's own processes until it began.
    gathered_s: Mapping[str, float]
    other_rows: int

    @property
    def ratio(self) -> float:
        """Makespan over ``bound_s``."""
        return self.makespan_s / self.bound_s if self.bound_s else 1.0


def simulate(
    jobs: Sequence[PlannedJob],
    nodes: Sequence[Node],
    estimates: Estimates,
    *,
    settings: SimulationSettings | None = None,
    schedule_settings: ScheduleSettings | None = None,
    truth: Callable[[Job], Estimate] | None = None,
    extra_events: Iterable[Event] = (),
) -> SimulationResult:
    """Run ``jobs`` on virtual ``nodes`` to the end.

    ``truth`` gives the durations about which actual ones scatter; by default the estimates are
    right on average. ``extra_events`` are put in at their times (a ``StopRequested``, say).

    Raises:
        InvariantViolated: the schedule broke a rule, or the run did not end.
    """
    settings = settings or SimulationSettings()
    how = schedule_settings or ScheduleSettings()
    learning = isinstance(estimates, LearningEstimates)
    if truth is None:
        truth = (deepcopy(estimates) if learning else estimates).estimate
    schedule = Schedule(jobs, how, estimates)
    cluster = VirtualCluster(schedule, settings, truth)
    cluster.invariants.work_until = how.work_until
    cluster.invariants.over_by = how.work_until + how.stop_s
    cluster.invariants.stop_patience_s = how.stop_patience_s
    if not learning:
        cluster.invariants.lasts_s = lambda job: estimates.estimate(job).run_s
    reused = {planned.job.job_id for planned in jobs if planned.action is Action.REUSE}
    cluster.invariants.needs = {
        planned.job.job_id: set(planned.needs) - reused for planned in jobs if planned.needs
    }
    for node in nodes:
        cluster.later(0.0, NodeJoined(at=0.0, node=node))
    for at, node in settings.joins:
        cluster.later(at, NodeJoined(at=at, node=node))
    for event in extra_events:
        cluster.later(event.at, event)
    for at in settings.faults.node_losses:
        cluster.lose_node_at(at)
    cluster.later(0.0, Tick(at=0.0))
    cluster.run()
    to_run = [p.job for p in jobs if p.action in (Action.RUN, Action.UNSUPPORTED)]
    cluster.invariants.check_end(job.job_id for job in to_run)
    joined = [*nodes, *(node for _, node in settings.joins)]
    return _result(cluster, [p.job for p in jobs if p.action is Action.RUN], joined)


def _result(
    cluster: VirtualCluster, jobs: Sequence[Job], nodes: Sequence[Node]
) -> SimulationResult:
    """The figures of a run that has ended."""
    work_s = bound_s = 0.0
    for kind in {job.accelerator for job in jobs}:
        cards = sum(len(node.cards) for node in nodes if node.accelerator is kind)
        run_s = total_s = longest_s = longest_total_s = 0.0
        for job in jobs:
            ran = cluster.ran.get(job.job_id)
            if job.accelerator is not kind or ran is None:
                continue
            with_start = ran + cluster.settings.start_s if job.alone else ran
            run_s += ran * job.cards
            total_s += with_start * job.cards
            longest_s, longest_total_s = max(longest_s, ran), max(longest_total_s, with_start)
        if cards:
            work_s = max(work_s, run_s / cards, longest_s)
            bound_s = max(bound_s, total_s / cards, longest_total_s)
    card_time = cluster.last_row * sum(len(node.cards) for node in nodes)
    return SimulationResult(
        makespan_s=cluster.last_row,
        work_bound_s=work_s,
        bound_s=bound_s,
        busy_fraction=cluster.busy / card_time if card_time else 0.0,
        start_fraction=cluster.starting / card_time if card_time else 0.0,
        events=cluster.events,
        commands=cluster.commands,
        workers=cluster.workers,
        attempts=sum(cluster.invariants.attempts.values()),
        faults=cluster.chance.faults,
        rows=tuple(cluster.invariants.final.values()),
        gathered_s=cluster.gathered,
        other_rows=cluster.other_rows,
    )
