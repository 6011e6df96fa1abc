"""Records of the executor: a worker, an attempt in progress."""

from __future__ import annotations

from collections import deque
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
    heard: WorkerInfo | None = None  # as its last outcome said it, where a process has said so
    attempt_id: str | None = None
    ahead: deque[str] = field(default_factory=deque)  # attempts that it was given behind that one
    succeeded: str = ""  # its last attempt, if that did
    stopping: bool = False  # a stop is on its way, or done but not yet told
    asked: bool = False  # by the schedule, so its end is no failure
    failure: Failure | None = None  # why it ends
    gone: bool = False  # its process is, and its card is free
    stop_deadline: float = float("inf")

    @property
    def known(self) -> WorkerInfo | None:
        """The latest word on the process: from its last outcome, else from its start."""
        return self.heard or self.info

    def may_go_on(self, after: str) -> bool:
        """Return whether what comes after this attempt may still begin here: it is the last that
        the worker was given, and has not ended but well."""
        last = self.ahead[-1] if self.ahead else self.attempt_id or self.succeeded
        return last == after and not self.gone

    def ended(self, attempt_id: str, *, succeeded: bool) -> list[str]:
        """Note the end of an attempt. After a success the worker goes on with what it was given
        ahead; after anything else what is behind it never begins, and is returned."""
        given = [*filter(None, [self.attempt_id]), *self.ahead]
        if attempt_id not in given:
            return []
        at = given.index(attempt_id)
        if at == 0:
            self.succeeded = attempt_id if succeeded else ""
        kept = given[:at] + (given[at + 1 :] if succeeded else [])
        self.attempt_id = kept[0] if kept else None
        self.ahead = deque(kept[1:])
        return [] if succeeded else given[at + 1 :]


@dataclass(slots=True)
class Running:
    """An attempt in progress: which workers are its ranks, and how those ended that have."""

    attempt: Attempt
    worker_ids: tuple[str, ...]
    lasted: Interval = field(default_factory=Interval)
    given_ahead: bool = False  # behind another on its worker
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
