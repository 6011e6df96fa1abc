"""Retry policies: the consequences of a failed attempt, by the class of its failure.

One policy a class: how often a job is tried again, how long to wait first, whether to go elsewhere,
whether the worker may be used again, what the card has to answer for, and the state that the job
ends in when the tries are used up. A failure that the job itself causes (out of memory, bad
configuration) is never retried: the same card would be burnt twice for the same answer. A failure
of the surroundings (card, node, network) is retried where those surroundings are different.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.core.job import State
from orchestrator.core.outcome import FailureClass, Outcome

#: The longest pause before a retry, seconds.
MAX_BACKOFF_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Treatment of one class of failure, with its reason."""

    retries: int  # further tries after the first failure of this class
    backoff_s: float  # before the first retry; doubles with each
    elsewhere: Literal["", "card", "node"]  # what the retry must differ in, while there is another
    replace_worker: bool  # the process is not trusted any more
    #: When the card is held responsible: never; once the job has succeeded on another card
    #: (only then is it known that the job was not at fault); or at once.
    blame_card: Literal["never", "if_it_works_elsewhere", "at_once"]
    job_specific: bool  # whether other jobs may well succeed where this one failed
    state: State  # the job's last state when no retry is left
    reason: str  # why this policy


POLICIES: Mapping[FailureClass, Policy] = {
    FailureClass.OUT_OF_MEMORY: Policy(
        retries=0,
        backoff_s=0.0,
        elsewhere="",
        replace_worker=True,
        blame_card="never",
        job_specific=True,
        state=State.OUT_OF_MEMORY,
        reason="it would not fit the second time either; the allocator is left fragmented",
    ),
    FailureClass.HOST_OUT_OF_MEMORY: Policy(
        retries=1,
        backoff_s=30.0,
        elsewhere="node",
        replace_worker=True,
        blame_card="never",
        job_specific=True,
        state=State.FAILED,
        reason="neighbours share the host's memory, so another hour or node may have room",
    ),
    FailureClass.UNSUPPORTED: Policy(
        retries=0,
        backoff_s=0.0,
        elsewhere="",
        replace_worker=False,
        blame_card="never",
        job_specific=True,
        state=State.UNSUPPORTED,
        reason="the device cannot do it; asking again changes nothing",
    ),
    FailureClass.BAD_CONFIGURATION: Policy(
        retries=0,
        backoff_s=0.0,
        elsewhere="",
        replace_worker=False,
        blame_card="never",
        job_specific=True,
        state=State.FAILED,
        reason="the job contradicts itself; only an edit of the grid helps",
    ),
    FailureClass.DATA_MISSING: Policy(
        retries=1,
        backoff_s=0.0,
        elsewhere="node",
        replace_worker=False,
        blame_card="never",
        job_specific=True,
        state=State.FAILED,
        reason="a file system may be mounted on one node and not on another",
    ),
    FailureClass.COMPILE: Policy(
        retries=1,
        backoff_s=0.0,
        elsewhere="card",
        replace_worker=True,
        blame_card="never",
        job_specific=True,
        state=State.FAILED,
        reason="mostly deterministic; one fresh process rules out a spoilt compile cache",
    ),
    FailureClass.ACQUIRE: Policy(
        retries=3,
        backoff_s=2.0,
        elsewhere="card",
        replace_worker=True,
        blame_card="at_once",
        job_specific=False,
        state=State.FAILED,
        reason="another process holds the card or it is broken; no job can have done that",
    ),
    FailureClass.CARD_FAULTY: Policy(
        retries=3,
        backoff_s=0.0,
        elsewhere="card",
        replace_worker=True,
        blame_card="at_once",
        job_specific=False,
        state=State.FAILED,
        reason="it computed something wrong before any job had begun",
    ),
    FailureClass.COLLECTIVE: Policy(
        retries=2,
        backoff_s=5.0,
        elsewhere="card",
        replace_worker=True,
        blame_card="if_it_works_elsewhere",
        job_specific=False,
        state=State.FAILED,
        reason="links between cards fail for a moment, or on one card for good",
    ),
    FailureClass.HANG: Policy(
        retries=1,
        backoff_s=0.0,
        elsewhere="card",
        replace_worker=True,
        blame_card="if_it_works_elsewhere",
        job_specific=True,
        state=State.TIMED_OUT,
        reason="a hang costs a whole time limit, so it is tried only once more",
    ),
    FailureClass.CRASH: Policy(
        retries=2,
        backoff_s=2.0,
        elsewhere="card",
        replace_worker=True,
        blame_card="if_it_works_elsewhere",
        job_specific=False,
        state=State.FAILED,
        reason="a signal may come from the job, the driver or the card; other cards tell which",
    ),
    FailureClass.NODE_LOST: Policy(
        retries=4,
        backoff_s=0.0,
        elsewhere="",
        replace_worker=True,
        blame_card="never",
        job_specific=False,
        state=State.LOST,
        reason="the job did nothing wrong and the node is gone anyway",
    ),
    FailureClass.IMPORT: Policy(
        retries=1,
        backoff_s=0.0,
        elsewhere="node",
        replace_worker=True,
        blame_card="if_it_works_elsewhere",
        job_specific=False,
        state=State.FAILED,
        reason="packages are installed per node, so another node may have them",
    ),
    FailureClass.ERROR: Policy(
        retries=1,
        backoff_s=0.0,
        elsewhere="card",
        replace_worker=True,
        blame_card="never",
        job_specific=True,
        state=State.FAILED,
        reason="of no known class: once more in a fresh process, then believe it",
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
    """The class of a failed attempt, from its state and its ranks' failures.

    When one rank of a gang runs out of memory the others report a broken collective, often
    sooner; the cause goes before its consequences.
    """
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

    ``attempts`` counts its tries of all classes in this run; ``max_attempts`` bounds them, so
    that a job which fails differently each time ends too. The reason begins with ``message``, the
    cause of the failure, since who reads it may see no more than its beginning.
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
