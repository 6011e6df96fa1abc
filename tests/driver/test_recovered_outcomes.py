"""Rows of outcomes that nodes kept for a driver that died before it could write them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_cases import a_worker
from schedule_cases import job, node

from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, RankOutcome
from orchestrator.driver.recovery import recover_outcomes, recovered_records
from orchestrator.on_ray.outcomes import KeptOutcome
from orchestrator.store.store import Store
from orchestrator.worker.orphans import Owner
from orchestrator.worker.protocol import Ended

NODE = node("n1", cards=2)


def attempt(name: str = "job", cards: int = 1, **changes: Any) -> Attempt:
    known = {"attempt_id": f"{name}-1", "job_id": name, "number": 1, "job": job(name)}
    return Attempt(**known | {"cards": NODE.cards[:cards]} | changes)


def kept(of: Attempt, rank: int = 0, failure: Failure | None = None) -> KeptOutcome:
    """An outcome of one rank that a node kept."""
    outcome = RankOutcome(
        rank=rank,
        state=State.FAILED if failure else State.SUCCEEDED,
        started_at=1.0,
        ended_at=2.0,
        failure=failure,
        worker=a_worker(worker_id="w"),
    )
    return KeptOutcome(of, rank, Ended("w", of.attempt_id, outcome, False))


def test_an_outcome_becomes_the_next_attempt_at_its_job() -> None:
    """Final, as the dead driver would have had it."""
    (record,) = recovered_records([kept(attempt())], {"job-1"})
    assert record.attempt is not None and record.outcome is not None
    assert (record.attempt.attempt_id, record.attempt.number) == ("job-2", 2)
    assert record.outcome.attempt_id == "job-2"
    assert (record.state, record.final) == (State.SUCCEEDED, True)


def test_what_has_a_row_is_not_recovered_again() -> None:
    """Its driver died between the row and the word to the node."""
    assert list(recovered_records([kept(attempt())], {"other-1"})) == []


def test_a_gang_needs_all_of_its_ranks() -> None:
    """One of them may have been on a node that is gone."""
    gang = attempt(cards=2)
    assert list(recovered_records([kept(gang)], {"job-1"})) == []
    (record,) = recovered_records([kept(gang), kept(gang, rank=1)], {"job-1"})
    assert record.state is State.SUCCEEDED


@pytest.mark.parametrize("purpose", ["probe", "measure"])
def test_a_failure_and_a_probe_are_not_final(purpose: str) -> None:
    """The job is tried again, or searched on."""
    failure = Failure(failure_class=FailureClass.CRASH, message="SIGSEGV")
    failed = kept(attempt(purpose=purpose), failure=failure)
    (record,) = recovered_records([failed], {"job-1"})
    assert (record.state, record.reason, record.final) == (State.FAILED, "SIGSEGV", False)
    (record,) = recovered_records([kept(attempt(purpose="probe"))], {"job-1"})
    assert not record.final


def test_the_rows_are_written_before_anything_is_planned(tmp_path: Path) -> None:
    """And somebody is told of them."""
    said: list[str] = []
    session: Any = SimpleNamespace(nodes=(NODE,), kept_outcomes=lambda _: [kept(attempt())])
    owner = Owner(run_id="0123456789ab", invocation_id="next")
    with Store.open(tmp_path, "night") as store, owner.marks_this_process():
        recover_outcomes(session, store, said.append)
        assert said == [] and store.measurements() == []
        store.interrupted = ("job-1",)
        recover_outcomes(session, store, said.append)
    (row,) = store.measurements()
    assert (row.attempt_id, row.state, row.final) == ("job-2", State.SUCCEEDED, True)
    assert said == ["recovered 1 row from outcomes that nodes kept for a driver that died"]
