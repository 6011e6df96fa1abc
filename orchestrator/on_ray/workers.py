"""Records of the executor: a worker, an attempt in progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.domain.attempt import Attempt, Outcome, RankOutcome, WorkerInfo
from orchestrator.domain.failure import Failure, FailureClass
from orchestrator.domain.job import State
from orchestrator.domain.topology import Card
from orchestrator.host.clock import Interval


@dataclass(slots=True)
class Worker:
    """One started worker, and how far it is."""

    worker_id: str
    card: Card
    info: WorkerInfo | None = None
    attempt_id: str | None = None
    stopping: bool = False  # a stop is on its way, or done but not yet told
    asked: bool = False  # by the schedule, so its end is no failure
    failure: Failure | None = None  # why it ends
    gone: bool = False  # its process is, and its card is free
    stop_deadline: float = float("inf")


@dataclass(slots=True)
class Running:
    """An attempt in progress: which workers are its ranks, and how those ended that have."""

    attempt: Attempt
    worker_ids: tuple[str, ...]
    lasted: Interval = field(default_factory=Interval)
    waiting: bool = False  # for the rendezvous of a gang; no rank was told to run yet
    ended: dict[int, RankOutcome] = field(default_factory=dict)
    first: RankOutcome | None = None  # the rank that failed first

    def outcome(self) -> Outcome:
        """All ranks together, once all have ended."""
        cause = self._cause()
        return Outcome(
            attempt_id=self.attempt.attempt_id,
            state=cause.state if cause else State.SUCCEEDED,
            ranks=tuple(self.ended[rank] for rank in sorted(self.ended)),
            failure=cause.failure if cause else None,
        )

    def _cause(self) -> RankOutcome | None:
        """The rank whose failure ended the attempt. When one dies, the others' broken exchange
        with it may be reported first; ranks that were stopped are LOST."""
        first = self.first
        if first is None or not _is_collective(first):
            return first
        own = [
            outcome
            for outcome in self.ended.values()
            if outcome.state not in (State.SUCCEEDED, State.LOST) and not _is_collective(outcome)
        ]
        return min(own, key=lambda outcome: outcome.ended_at, default=first)


def _is_collective(outcome: RankOutcome) -> bool:
    failure = outcome.failure
    return failure is not None and failure.failure_class is FailureClass.COLLECTIVE
