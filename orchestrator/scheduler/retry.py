"""Retry policies, one a class of failure, and the circuit breaker.

Failures caused by the job are never retried, since the answer would be the same; failures of card,
node or network are retried elsewhere. A broken driver, a missing package or a wrong image makes
every attempt fail within seconds: the breaker stops the run if the first few jobs or cards, in
order of start (of a thousand cards the few bad ones fail first), fail alike and soon. A success, a
late failure or one of another class disarms it for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from orchestrator.core.job import State
from orchestrator.core.outcome import FailureClass, Outcome

#: The longest pause before a retry, seconds.
MAX_BACKOFF_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Treatment of one class of failure, with its reason."""

    reason: str  # why this policy
    retries: int = 0  # further tries after the first failure of this class
    backoff_s: float = 0.0  # before the first retry; doubles with each
    elsewhere: Literal["", "card", "node"] = ""  # what a retry must differ in, if there is another
    replace_worker: bool = True  # the process is not trusted any more
    #: When to blame the card; success elsewhere proves that the job was not at fault.
    blame_card: Literal["never", "if_it_works_elsewhere", "at_once"] = "never"
    job_specific: bool = True  # whether other jobs may well succeed where this one failed
    state: State = State.FAILED  # the job's last state when no retry is left


POLICIES: Mapping[FailureClass, Policy] = {
    FailureClass.OUT_OF_MEMORY: Policy(
        reason="it would not fit the second time either; the allocator is left fragmented",
        state=State.OUT_OF_MEMORY,
    ),
    FailureClass.HOST_OUT_OF_MEMORY: Policy(
        reason="neighbours share the host's memory, so another hour or node may have room",
        retries=1,
        backoff_s=30.0,
        elsewhere="node",
        state=State.OUT_OF_MEMORY,
    ),
    FailureClass.UNSUPPORTED: Policy(
        reason="the device cannot do it; asking again changes nothing",
        replace_worker=False,
        state=State.UNSUPPORTED,
    ),
    FailureClass.BAD_CONFIGURATION: Policy(
        reason="the job contradicts itself; only an edit of the grid helps", replace_worker=False
    ),
    FailureClass.DATA_MISSING: Policy(
        reason="a file system may be mounted on one node and not on another",
        retries=1,
        elsewhere="node",
        replace_worker=False,
        blame_card="if_it_works_elsewhere",
    ),
    FailureClass.NODE_STORAGE: Policy(
        reason="a disk, a quota or shared memory of this node is used up, another's may not be",
        retries=1,
        backoff_s=30.0,
        elsewhere="node",
        blame_card="if_it_works_elsewhere",
    ),
    FailureClass.COMPILE: Policy(
        reason="mostly deterministic; one fresh process rules out a spoilt compile cache",
        retries=1,
        elsewhere="card",
        blame_card="if_it_works_elsewhere",
    ),
    FailureClass.ACQUIRE: Policy(
        reason="another process holds the card or it is broken; no job can have done that",
        retries=3,
        backoff_s=2.0,
        elsewhere="card",
        blame_card="at_once",
        job_specific=False,
    ),
    FailureClass.CARD_FAULTY: Policy(
        reason="it computed something wrong, or its driver reports a fault or that it is gone",
        retries=3,
        elsewhere="card",
        blame_card="at_once",
        job_specific=False,
    ),
    FailureClass.COLLECTIVE: Policy(
        reason="links between cards fail for a moment, or on one card for good",
        retries=2,
        backoff_s=5.0,
        elsewhere="card",
        blame_card="if_it_works_elsewhere",
        job_specific=False,
    ),
    FailureClass.HANG: Policy(
        reason="a hang costs a whole time limit, so it is tried only once more",
        retries=1,
        elsewhere="card",
        blame_card="if_it_works_elsewhere",
        state=State.TIMED_OUT,
    ),
    FailureClass.CRASH: Policy(
        reason="a signal may come from the job, the driver or the card; other cards tell which",
        retries=2,
        backoff_s=2.0,
        elsewhere="card",
        blame_card="if_it_works_elsewhere",
        job_specific=False,
    ),
    FailureClass.NODE_LOST: Policy(
        reason="the job did nothing wrong and the node is gone anyway",
        retries=4,
        job_specific=False,
        state=State.LOST,
    ),
    FailureClass.CANCELLED: Policy(
        reason="somebody cancelled it; the next start of the run measures it",
        state=State.LOST,
    ),
    FailureClass.IMPORT: Policy(
        reason="packages are installed per node, so another node may have them",
        retries=1,
        elsewhere="node",
        blame_card="if_it_works_elsewhere",
        job_specific=False,
    ),
    FailureClass.ERROR: Policy(
        reason="of no known class: once more in a fresh process, then believe it",
        retries=1,
        elsewhere="card",
        blame_card="if_it_works_elsewhere",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Decision about one failed attempt."""

    retry: bool
    delay_s: float  # before the retry
    state: State  # of the job when it is not retried
    reason: str  # names the limit that was reached, or the retry


def failure_class_of(outcome: Outcome) -> FailureClass:
    """The class of a failed attempt, from its state and its ranks' failures. A rank that is out
    of memory goes before the broken collectives that others report, often sooner."""
    classes = {rank.failure.failure_class for rank in outcome.ranks if rank.failure is not None}
    if outcome.state is State.OUT_OF_MEMORY or FailureClass.OUT_OF_MEMORY in classes:
        return FailureClass.OUT_OF_MEMORY
    if outcome.state is State.UNSUPPORTED:
        return FailureClass.UNSUPPORTED
    if outcome.failure is not None:
        return outcome.failure.failure_class
    by_state = {State.TIMED_OUT: FailureClass.HANG, State.LOST: FailureClass.NODE_LOST}
    return by_state.get(outcome.state, FailureClass.ERROR)


def judge(
    failure_class: FailureClass,
    message: str = "",
    *,
    failures: int,
    attempts: int,
    max_attempts: int,
) -> Verdict:
    """Decide on a job that has failed ``failures`` times in this class, this time included.

    ``attempts`` counts its tries in this run over all classes, bounded by ``max_attempts``. The
    reason begins with ``message``, since a reader may see only its beginning.
    """
    policy = POLICIES[failure_class]
    tried = f"{failure_class} after {attempts} attempt{'s' if attempts > 1 else ''}"
    delay, retry = 0.0, False
    if failures > policy.retries:
        limit = "1 retry" if policy.retries == 1 else f"{policy.retries or 'no'} retries"
        rule = f"{tried}; limit is {limit}: {policy.reason}"
    elif attempts >= max_attempts:
        rule = f"{tried}, the most that a job gets"
    else:
        delay, retry = min(policy.backoff_s * 2 ** (failures - 1), MAX_BACKOFF_S), True
        where = f" on another {policy.elsewhere}" if policy.elsewhere else ""
        rule = f"{failure_class}; retry {failures} of {policy.retries}{where}"
    reason = f"{message} ({rule})" if message else rule
    return Verdict(retry=retry, delay_s=delay, state=policy.state, reason=reason)


class Breaker:
    """Trips if the first ``limit`` subjects (jobs or cards) all fail alike; ``tripped`` is why."""

    def __init__(self, what: str, limit: int, within_s: float) -> None:
        self.tripped = ""
        self._what = what  # e.g. "attempts"
        self.limit = limit
        self._within_s = within_s
        self._armed = True
        #: Class, seconds and message of those that failed, in order; emptied when it is disarmed.
        self.subjects: dict[str, tuple[FailureClass, float, str] | None] = {}

    def begun(self, subject: str) -> None:
        """Note the start of a job's attempt or a card's worker."""
        if self._armed:
            self.subjects.setdefault(subject, None)

    def withdrawn(self, subject: str) -> None:
        """Forget a subject that ended before it could succeed or fail; the next takes its place."""
        if subject in self.subjects and self.subjects[subject] is None:
            del self.subjects[subject]
            self._look()

    def success(self) -> None:
        """Disarm: the surroundings are sound."""
        self._armed = False
        self.subjects.clear()

    def failure(
        self, failure_class: FailureClass, subject: str, took_s: float, message: str
    ) -> None:
        """Note the failure of a job or card."""
        if failure_class is FailureClass.NODE_LOST:
            self.withdrawn(subject)
        elif subject in self.subjects:
            self.subjects[subject] = (failure_class, took_s, message)
            self._look()

    def _look(self) -> None:
        watched = list(islice(self.subjects.values(), self.limit))
        failed = [failure for failure in watched if failure is not None]
        classes = {failure_class for failure_class, _, _ in failed}
        late = any(took_s > self._within_s for _, took_s, _ in failed)
        if late or len(classes) > 1 or any(POLICIES[one].job_specific for one in classes):
            self.success()
        elif len(failed) == self.limit:
            self.tripped = (
                f"circuit breaker: the first {self.limit} {self._what} all failed at once with "
                f"{failed[0][0]} (the last: {failed[-1][2]}); nothing else would fare better"
            )
            self.success()
