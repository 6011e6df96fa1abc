"""Outcomes that a node keeps until the driver has synced their rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.on_ray import outcomes
from orchestrator.on_ray.outcomes import KeptOutcome, OutcomeKeeper, kept_here, kept_outcomes
from orchestrator.worker.leftovers import Owner
from orchestrator.worker.messages import Ended, Run, Stopped

FIRST, NEXT = (Owner(run_id="run", invocation_id=name) for name in ("first", "next"))


@pytest.fixture(autouse=True)
def own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes.tempfile, "gettempdir", lambda: str(tmp_path))


def run(keeper: OutcomeKeeper, attempt_id: str, rank: int = 0) -> None:
    """Run one rank to its end."""
    order: Any = SimpleNamespace(attempt_id=attempt_id, rank=rank, attempt=f'"{attempt_id}"')
    keeper.sent(Run("w", order, None))
    keeper.keep(Ended("w", attempt_id, b"outcome", False))


def kept() -> list[KeptOutcome]:
    return list(kept_outcomes((), "run"))


def test_an_outcome_is_kept_until_its_row_is_durable() -> None:
    """Whatever becomes of the agent meanwhile."""
    keeper = OutcomeKeeper(FIRST)
    run(keeper, "job-1")
    run(keeper, "job-10", rank=1)
    keeper.keep(Stopped("w"))
    assert [(found.attempt, found.rank) for found in kept()] == [('"job-1"', 0), ('"job-10"', 1)]
    assert kept()[0].ended == Ended("w", "job-1", b"outcome", False)
    keeper.durable(["job-1"])
    assert [found.rank for found in kept()] == [1]
    keeper.durable(["job-10"])
    assert kept() == []


def test_another_agent_of_the_same_driver_keeps_what_is_there() -> None:
    """The rows wait in the driver; the agents of the next driver forget them."""
    run(OutcomeKeeper(FIRST), "job-1")
    OutcomeKeeper(FIRST)
    assert len(kept()) == 1
    OutcomeKeeper(NEXT)
    assert kept() == []


def test_what_did_not_run_or_has_no_outcome_is_not_kept() -> None:
    """Nor anything without a run."""
    keeper = OutcomeKeeper(FIRST)
    keeper.keep(Ended("w", "job-1", b"outcome", False))
    keeper.sent(Run("w", SimpleNamespace(attempt_id="job-2", rank=0, attempt=""), None))  # type: ignore[arg-type]
    keeper.keep(Ended("w", "job-2", None, True))
    run(OutcomeKeeper(None), "job-3")
    assert kept() == []


def test_a_directory_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    """It may have been laid for us."""
    keeper = OutcomeKeeper(FIRST)
    run(keeper, "job-1")
    [base] = tmp_path.glob("nightgrid-outcomes-*")
    base.chmod(0o755)
    assert kept_here("run") == []
    run(OutcomeKeeper(FIRST), "job-2")
    base.chmod(0o700)
    assert len(kept_here("run")) == 1
