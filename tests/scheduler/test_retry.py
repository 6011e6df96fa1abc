"""The retry policies."""

from __future__ import annotations

import pytest

from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, Outcome, RankOutcome
from orchestrator.scheduler.retry import MAX_BACKOFF_S, POLICIES, failure_class_of, judge


@pytest.mark.parametrize("failure_class", FailureClass)
def test_every_failure_class_has_a_policy_with_a_reason(failure_class: FailureClass) -> None:
    """No class is left to chance, and each policy ends in a terminal state that is no success."""
    policy = POLICIES[failure_class]
    assert policy.reason
    assert policy.state.terminal and policy.state is not State.SUCCEEDED


@pytest.mark.parametrize(
    "failure_class",
    [FailureClass.OUT_OF_MEMORY, FailureClass.UNSUPPORTED, FailureClass.BAD_CONFIGURATION],
)
def test_what_the_job_itself_causes_is_not_retried(failure_class: FailureClass) -> None:
    """The same job on another card would give the same answer."""
    assert not judge(failure_class, failures=1, attempts=1, max_attempts=9).retry


@pytest.mark.parametrize("failure_class", FailureClass)
def test_retries_are_counted_by_class(failure_class: FailureClass) -> None:
    """A class with n retries fails n times into a retry, and the next time into its state."""
    retries = POLICIES[failure_class].retries
    for failures in range(1, retries + 1):
        assert judge(failure_class, failures=failures, attempts=failures, max_attempts=99).retry
    last = judge(failure_class, failures=retries + 1, attempts=retries + 1, max_attempts=99)
    assert not last.retry
    assert last.state is POLICIES[failure_class].state


def test_the_reason_is_the_cause_and_then_the_limit_that_was_reached() -> None:
    """The row says what happened first, then why it was given up or is tried again."""
    verdict = judge(FailureClass.CRASH, "killed by SIGSEGV", failures=3, attempts=3, max_attempts=9)
    assert verdict.reason.startswith(
        "killed by SIGSEGV (crash after 3 attempts; limit is 2 retries: a signal may come"
    )
    verdict = judge(FailureClass.CRASH, "killed by SIGSEGV", failures=1, attempts=1, max_attempts=9)
    assert verdict.reason == "killed by SIGSEGV (crash; retry 1 of 2 on another card)"


def test_attempts_of_all_classes_together_are_bounded() -> None:
    """A job that fails differently each time ends too."""
    verdict = judge(FailureClass.CRASH, failures=1, attempts=4, max_attempts=4)
    assert not verdict.retry
    assert "after 4 attempts, the most that a job gets" in verdict.reason


def test_the_pause_doubles_up_to_a_limit() -> None:
    """What fails again so soon is given more time."""
    pauses = [
        judge(FailureClass.ACQUIRE, failures=n, attempts=n, max_attempts=99).delay_s
        for n in (1, 2, 3)
    ]
    assert pauses == [2.0, 4.0, 8.0]
    assert max(pauses) <= MAX_BACKOFF_S


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY),
        (State.UNSUPPORTED, FailureClass.UNSUPPORTED),
        (State.TIMED_OUT, FailureClass.HANG),
        (State.LOST, FailureClass.NODE_LOST),
        (State.FAILED, FailureClass.ERROR),
    ],
)
def test_an_outcome_without_a_failure_is_classed_by_its_state(
    state: State, expected: FailureClass
) -> None:
    """An executor that only knows how it ended still gets the right policy."""
    assert failure_class_of(Outcome(attempt_id="x", state=state, ranks=())) is expected


def test_the_failure_of_an_outcome_goes_before_its_state() -> None:
    """LOST with a crash is a crash: it counts against the card, a lost node does not."""
    failure = Failure(failure_class=FailureClass.CRASH, message="signal 9")
    outcome = Outcome(attempt_id="x", state=State.LOST, ranks=(), failure=failure)
    assert failure_class_of(outcome) is FailureClass.CRASH


def test_out_of_memory_of_one_rank_explains_the_collective_failure_of_the_others() -> None:
    """The first to report is not always the first to fail."""
    collective = Failure(failure_class=FailureClass.COLLECTIVE, message="peer closed connection")
    memory = Failure(failure_class=FailureClass.OUT_OF_MEMORY, message="tried to allocate 2 GiB")
    ranks = tuple(
        RankOutcome(rank=rank, state=state, started_at=0.0, ended_at=1.0, failure=failure)
        for rank, (state, failure) in enumerate(
            [(State.FAILED, collective), (State.OUT_OF_MEMORY, memory), (State.FAILED, collective)]
        )
    )
    outcome = Outcome(attempt_id="x", state=State.FAILED, ranks=ranks, failure=collective)
    assert failure_class_of(outcome) is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY),
        (State.UNSUPPORTED, FailureClass.UNSUPPORTED),
    ],
)
def test_a_state_that_says_it_all_goes_before_the_failure(
    state: State, expected: FailureClass
) -> None:
    """A row of that state is never followed by a retry."""
    failure = Failure(failure_class=FailureClass.ERROR, message="of no known class")
    outcome = Outcome(attempt_id="x", state=state, ranks=(), failure=failure)
    assert failure_class_of(outcome) is expected
