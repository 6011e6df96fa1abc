"""Rows of outcomes that nodes kept for a driver that died before it could write them.

The attempts of a dead driver have rows already: LOST, since nothing more was known. An outcome that
a node kept (``on_ray/outcomes.py``) becomes the row of one more attempt at its job, so that a job
which was measured is not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import RecordRow
from orchestrator.core.job import State
from orchestrator.core.outcome import Attempt, RankOutcome
from orchestrator.driver.rows import clean_row
from orchestrator.on_ray.executor import RunningAttempt, outcome_of
from orchestrator.on_ray.outcomes import KeptOutcome
from orchestrator.worker.environment import provenance
from orchestrator.worker.orphans import Owner

if TYPE_CHECKING:
    from orchestrator.driver.session import Session
    from orchestrator.store.store import Store


def recover_outcomes(session: Session, store: Store, say: Callable[[str], None]) -> None:
    """Write the rows of interrupted attempts whose outcomes the nodes of a session kept."""
    owner = Owner.of_this_process()
    if not store.interrupted or owner is None:
        return
    kept = session.kept_outcomes(store.run_id)
    rows = [
        clean_row(
            measurement_of(
                record,
                run=store.run,
                invocation_id=owner.invocation_id,
                recorded_at=time.time(),
                provenance=provenance(),
                nodes=session.nodes,
            )
        )
        for record in recovered_records(kept, store.interrupted)
    ]
    if rows:
        store.append(*rows)
        count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
        say(f"recovered {count} from outcomes that nodes kept for a driver that died")


def recovered_records(
    kept_outcomes: Iterable[KeptOutcome], interrupted: Collection[str]
) -> Iterator[RecordRow]:
    """The rows of those of the interrupted attempts all of whose ranks have an outcome, each as the
    attempt after the one that is LOST. One that failed is tried again."""
    attempts: dict[str, RunningAttempt] = {}
    for kept in kept_outcomes:
        attempt = Attempt.from_json(kept.attempt)
        rank_outcome = outcome_of(kept.ended, None)
        if attempt.attempt_id in interrupted and isinstance(rank_outcome, RankOutcome):
            running = attempts.setdefault(
                attempt.attempt_id, RunningAttempt(attempt=attempt, worker_ids=())
            )
            running.ended[kept.rank] = rank_outcome
    for running in attempts.values():
        if len(running.ended) < len(running.attempt.cards):
            continue
        failures = [rank for rank in running.ended.values() if rank.state is not State.SUCCEEDED]
        running.first_failure = min(failures, key=lambda rank: rank.ended_at, default=None)
        number = running.attempt.number + 1
        attempt_id = f"{running.attempt.job_id}-{number}"
        attempt = replace(running.attempt, attempt_id=attempt_id, number=number)
        outcome = replace(running.outcome(), attempt_id=attempt_id)
        yield RecordRow(
            job=attempt.job,
            state=outcome.state,
            reason=outcome.failure.message if outcome.failure is not None else "",
            final=outcome.state is State.SUCCEEDED and attempt.purpose == "measure",
            attempt=attempt,
            outcome=outcome,
        )
