"""The rank that explains the end of a gang, and the row's words on the others."""

from __future__ import annotations

import pytest
from driver_cases import job

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, RankOutcome
from orchestrator.core.topology import Card
from orchestrator.on_ray.executor import RunningAttempt

CARDS = tuple(Card(node_id="n", accelerator=Accelerator.HPU, index=index) for index in range(2))


def ended(rank: int, state: State, kind: FailureClass | None, at: float = 1.0) -> RankOutcome:
    failure = kind and Failure(kind, f"{kind} of {rank}")
    return RankOutcome(rank=rank, state=state, started_at=0.0, ended_at=at, failure=failure)


def running(*outcomes: RankOutcome) -> RunningAttempt:
    """An attempt whose ranks were reported in this order."""
    attempt = Attempt(attempt_id="j-1", job_id="j", number=1, job=job(1), cards=CARDS)
    return RunningAttempt(
        attempt=attempt,
        worker_ids=("a", "b"),
        ended={outcome.rank: outcome for outcome in outcomes},
        first_failure=next((o for o in outcomes if o.state is not State.SUCCEEDED), None),
    )


BROKEN = ended(0, State.FAILED, FailureClass.COLLECTIVE, at=1.0)


@pytest.mark.parametrize(
    ("other", "rank"),
    [
        (ended(1, State.FAILED, FailureClass.CRASH, at=1.1), 1),  # it died, rank 0 noticed first
        (ended(1, State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY, at=1.1), 1),
        (ended(1, State.LOST, FailureClass.HANG, at=2.0), 0),  # it was stopped because of rank 0
        (ended(1, State.FAILED, FailureClass.COLLECTIVE, at=0.9), 0),
        (ended(1, State.SUCCEEDED, None), 0),
    ],
)
def test_a_broken_exchange_is_explained_by_the_rank_that_broke_it(
    other: RankOutcome, rank: int
) -> None:
    """Whoever was reported first; ranks that were stopped explain nothing."""
    outcome = running(BROKEN, other).outcome()
    cause = (BROKEN, other)[rank]
    assert (outcome.state, outcome.failure) == (cause.state, cause.failure)
    assert [each.rank for each in outcome.ranks] == [0, 1]


def test_what_failed_first_of_itself_explains_the_end() -> None:
    first = ended(1, State.FAILED, FailureClass.ERROR)
    outcome = running(first, ended(0, State.FAILED, FailureClass.CRASH)).outcome()
    assert outcome.failure == first.failure


def test_a_gang_of_which_all_ranks_succeed_succeeds() -> None:
    outcome = running(ended(0, State.SUCCEEDED, None), ended(1, State.SUCCEEDED, None)).outcome()
    assert outcome.state is State.SUCCEEDED and outcome.failure is None


def test_the_row_of_a_failed_gang_tells_how_each_rank_ended() -> None:
    attempt = running(BROKEN, ended(1, State.FAILED, FailureClass.CRASH))
    record = RecordRow(
        job=attempt.attempt.job,
        state=State.FAILED,
        reason="crash",
        final=True,
        attempt=attempt.attempt,
        outcome=attempt.outcome(),
    )
    row = measurement_of(record, run="r", invocation_id="i", recorded_at=1.0)
    assert row.failure_class == "crash"
    assert row.details["ranks"] == (
        "rank 0 FAILED (collective: collective of 0); rank 1 FAILED (crash: crash of 1)"
    )
