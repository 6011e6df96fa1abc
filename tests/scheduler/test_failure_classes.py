"""From the words of a real failure to its class and to what becomes of the job: one table."""

from __future__ import annotations

import errno

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
)
from schedule_cases import cluster_of, job, nodes

from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, Outcome, RankOutcome
from orchestrator.on_ray.claims import agent_failure
from orchestrator.scheduler.retry import POLICIES, failure_class_of, judge
from orchestrator.worker.worker import describe
from workloads import base
from workloads.devices import device_for

#: Device, exception as it was seen, class; those of libraries are in tests/workloads/devices.
SEEN: list[tuple[str, BaseException, FailureClass]] = [
    ("hpu", base.Unsupported("fp16 on Gaudi needs Gaudi2"), FailureClass.UNSUPPORTED),
    ("cpu", base.BadConfiguration("3 does not divide 32"), FailureClass.BAD_CONFIGURATION),
    ("cpu", base.CardFaulty("12 wrong elements of 65,536"), FailureClass.CARD_FAULTY),
    ("cpu", SystemExit(3), FailureClass.CRASH),
    ("hpu", ModuleNotFoundError("No module named 'habana'"), FailureClass.IMPORT),
    ("cpu", base.DataMissing("/data/glm has no config.json"), FailureClass.DATA_MISSING),
    ("cpu", FileNotFoundError(errno.ENOENT, "No such file", "dev.json"), FailureClass.DATA_MISSING),
    ("cpu", KeyError("hidden_size"), FailureClass.ERROR),
]


@pytest.mark.parametrize(
    ("device", "error", "expected"),
    SEEN,
    ids=[f"{expected}-{device}-{type(error).__name__}" for device, error, expected in SEEN],
)
def test_a_workers_exception_is_of_the_class_of_its_words(
    device: str, error: BaseException, expected: FailureClass
) -> None:
    try:
        raise error
    except BaseException as raised:
        failure = describe(raised, device=device_for(device), memory_bytes=None, node_name="n")
    assert failure.failure_class is expected
    words = str(error).split()
    assert not words or words[-1].rstrip("'\"") in failure.message
    assert failure.message.splitlines() == [failure.message]
    assert type(error).__name__ in failure.tail


#: Of Ray 2.60, whose memory monitor killed an actor of ours.
LOW_ON_MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
    "127.0.0.2, ID: 02a3efc02a770ecdfbb6b6403beac3babb7f79b35c9f84f091f7670b) was 5.25GB used / "
    "23.54GB limit (0.222962) OOM kill reason: Memory usage 5565751296B exceeded threshold of "
    "505530208B (2.0% of 25276510208B limit) Object store memory usage: [- objects spillable: 0"
)
#: What Ray has instead of an answer, and the class of what ran on that node.
RAYS: list[tuple[RayError, FailureClass]] = [
    (OutOfMemoryError(LOW_ON_MEMORY), FailureClass.HOST_OUT_OF_MEMORY),
    (RayError(LOW_ON_MEMORY), FailureClass.HOST_OUT_OF_MEMORY),
    (
        NodeDiedError("Task failed because the node it was running on is dead"),
        FailureClass.NODE_LOST,
    ),
    (ActorDiedError(), FailureClass.NODE_LOST),
    (ActorUnavailableError("the actor is temporarily unavailable", None), FailureClass.NODE_LOST),
]


@pytest.mark.parametrize(
    ("error", "expected"),
    RAYS,
    ids=[f"{type(error).__name__}-{expected}" for error, expected in RAYS],
)
def test_what_ray_says_of_a_lost_agent_is_a_class(error: RayError, expected: FailureClass) -> None:
    failure = agent_failure(error)
    assert failure.failure_class is expected
    assert str(error).strip()[-200:] in failure.tail


@pytest.mark.parametrize("failure_class", FailureClass)
def test_a_job_that_always_fails_is_tried_as_often_as_its_class_says(
    failure_class: FailureClass,
) -> None:
    policy = POLICIES[failure_class]
    assert policy.reason and policy.state.terminal and policy.state is not State.SUCCEEDED
    cluster = cluster_of(
        job(), on=nodes(2), card_failures=99, node_failures=99, breaker_failures=99
    )
    tried = cluster.play_out(failure_class, took=60)
    assert len(tried) == policy.retries + 1
    assert [row.final for row in cluster.rows] == [False] * policy.retries + [True]
    for row in cluster.rows:
        assert row.outcome is not None and row.outcome.failure is not None
        assert row.outcome.failure.failure_class is failure_class
        assert str(failure_class) in row.reason
    last = cluster.finals()["a"]
    assert last.state is policy.state and policy.reason in last.reason
    cards = [attempt.cards[0] for attempt in tried]
    if policy.elsewhere == "card":
        assert len(set(cards)) == len(cards)
    if policy.elsewhere == "node":
        assert len({card.node_id for card in cards}) == min(2, len(cards))


ERROR = Failure(FailureClass.ERROR, "of no known class")
CRASH = Failure(FailureClass.CRASH, "signal 9")


@pytest.mark.parametrize(
    ("state", "failure", "expected"),
    [
        (State.OUT_OF_MEMORY, None, FailureClass.OUT_OF_MEMORY),
        (State.OUT_OF_MEMORY, ERROR, FailureClass.OUT_OF_MEMORY),
        (State.UNSUPPORTED, None, FailureClass.UNSUPPORTED),
        (State.UNSUPPORTED, ERROR, FailureClass.UNSUPPORTED),
        (State.TIMED_OUT, None, FailureClass.HANG),
        (State.LOST, None, FailureClass.NODE_LOST),
        (State.LOST, CRASH, FailureClass.CRASH),  # counts against the card; a lost node does not
        (State.FAILED, None, FailureClass.ERROR),
    ],
)
def test_an_outcome_is_classed_by_its_state_and_then_by_its_failure(
    state: State, failure: Failure | None, expected: FailureClass
) -> None:
    outcome = Outcome(attempt_id="x", state=state, ranks=(), failure=failure)
    assert failure_class_of(outcome) is expected


def test_failures_that_the_job_itself_causes_are_not_retried() -> None:
    own = (FailureClass.OUT_OF_MEMORY, FailureClass.UNSUPPORTED, FailureClass.BAD_CONFIGURATION)
    assert not any(POLICIES[kind].retries for kind in own)


def test_the_reason_is_the_cause_and_then_the_limit_that_was_reached() -> None:
    verdict = judge(FailureClass.CRASH, "killed by SIGSEGV", failures=3, attempts=3, max_attempts=9)
    assert verdict.reason.startswith(
        "killed by SIGSEGV (crash after 3 attempts; limit is 2 retries: a signal may come"
    )
    verdict = judge(FailureClass.CRASH, "killed by SIGSEGV", failures=1, attempts=1, max_attempts=9)
    assert verdict.reason == "killed by SIGSEGV (crash; retry 1 of 2 on another card)"


def test_attempts_of_all_classes_together_are_bounded() -> None:
    verdict = judge(FailureClass.CRASH, failures=1, attempts=4, max_attempts=4)
    assert not verdict.retry
    assert "after 4 attempts, the most that a job gets" in verdict.reason


def test_the_pause_doubles_with_each_retry() -> None:
    counts = [{"failures": n, "attempts": n, "max_attempts": 99} for n in (1, 2, 3)]
    assert [judge(FailureClass.ACQUIRE, **n).delay_s for n in counts] == [2.0, 4.0, 8.0]


def test_out_of_memory_of_one_rank_explains_the_collective_failure_of_the_others() -> None:
    """The first to report is not always the first to fail."""
    collective = Failure(FailureClass.COLLECTIVE, "peer closed connection")
    memory = Failure(FailureClass.OUT_OF_MEMORY, "tried to allocate 2 GiB")
    ranks = tuple(
        RankOutcome(rank=rank, state=state, started_at=0.0, ended_at=1.0, failure=failure)
        for rank, (state, failure) in enumerate(
            [(State.FAILED, collective), (State.OUT_OF_MEMORY, memory), (State.FAILED, collective)]
        )
    )
    outcome = Outcome(attempt_id="x", state=State.FAILED, ranks=ranks, failure=collective)
    assert failure_class_of(outcome) is FailureClass.OUT_OF_MEMORY
