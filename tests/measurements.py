"""Records to test with: jobs, samples, workers, attempts and rows."""

from __future__ import annotations

from typing import Any

from core_cases import a_job, a_sample, a_worker

from orchestrator.analysis.samples import metrics_of
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.core.outcome import Attempt, Outcome, RankOutcome, WorkerInfo
from orchestrator.core.topology import Card
from orchestrator.store.codec import measurements_of
from orchestrator.store.schema import SCHEMA_VERSION
from orchestrator.store.store import Store
from workloads.base import Item, Result


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "experiment": "tiny",
        "precision": "bf16",
        "batch_size": 8,
        "parameters": (("ignore_eos", True), ("output_tokens", 25)),
    }
    return a_job(**{**values, **changes})


def worker(**changes: Any) -> WorkerInfo:
    return a_worker(**{"versions": {"python": "3.11.7", "torch": "2.9.0"}, **changes})


def rank(number: int = 0, result: Result | None = None, **changes: Any) -> RankOutcome:
    values: dict[str, Any] = {
        "rank": number,
        "state": State.SUCCEEDED,
        "started_at": 1000.0,
        "ended_at": 1010.0,
        "result": result,
        "worker": worker(),
    }
    return RankOutcome(**{**values, **changes})


def attempt(of: Job, cards: int = 1, number: int = 1) -> Attempt:
    held = tuple(Card(node_id="n1", index=i, accelerator=of.accelerator) for i in range(cards))
    return Attempt(
        attempt_id=f"{of.job_id}-{number}", job_id=of.job_id, number=number, job=of, cards=held
    )


def outcome(of: Attempt, *ranks: RankOutcome, state: State = State.SUCCEEDED) -> Outcome:
    return Outcome(attempt_id=of.attempt_id, state=state, ranks=ranks)


def recorded(
    of: Attempt, *ranks: RankOutcome, state: State = State.SUCCEEDED, reason: str = "measured"
) -> RecordRow:
    ended = outcome(of, *ranks, state=state)
    final = state is not State.LOST
    return RecordRow(job=of.job, state=state, reason=reason, final=final, attempt=of, outcome=ended)


def of_job(one: Job) -> dict[str, Any]:
    """The columns of a row that tell its job."""
    names = (
        *("job_id", "experiment", "workload", "model", "dataset", "accelerator", "cards"),
        *("precision", "engine", "isolation", "measure"),
    )
    requested = {"batch_size_requested": str(one.batch_size), "parameters": dict(one.parameters)}
    return {name: getattr(one, name) for name in names} | requested


def row(number: int = 0, **changes: Any) -> Measurement:
    """A successful row of a job of its own per ``number``, whose figures agree: one sample of four
    prompts, with ``100 + number`` tokens/s."""
    one = job(batch_size=number + 1)
    taken = a_sample(step_s=(0.01, 0.02), wall_s=100.0 / (100.0 + number))
    prompts = tuple(
        (0, Item(index=index, input_tokens=10, output_tokens=25, latency_s=0.5))
        for index in range(4)
    )
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run": "night",
        "invocation_id": "i1",
        **of_job(one),
        "attempt_id": f"{one.job_id}-1",
        "attempt_number": 1,
        "final": True,
        "purpose": "measure",
        "recorded_at": 1000.0 + number,
        "batch_size": number + 1,
        "state": State.SUCCEEDED,
        "reason": "measured",
        "started_at": 990.0 + number,
        "ended_at": 999.5 + number,
        "nodes": ("hpu-1",),
        "card_indices": (0,),
        "emulated": True,
        "versions": {"python": "3.11.7"},
        "metrics": metrics_of(((0, taken),), prompts),
        "load_s": 1.5,
        "details": {"note": "裤 ✓"},
        "samples": ((0, taken),),
        "items": prompts,
    }
    return Measurement(**{**values, **changes})


def journal_row(number: int = 0, **changes: Any) -> Measurement:
    """The row that the attempt of ``row(number)`` gets should its driver die."""
    nothing: dict[str, Any] = {"samples": (), "items": (), "metrics": Metrics(), "details": {}}
    lost = {"state": State.LOST, "reason": "its driver died", "final": False}
    return row(number, **{**nothing, **lost, **changes})


def numbers(store: Store) -> list[int]:
    """The numbers of the rows (``row``) that a store shows, sorted."""
    return sorted((one.batch_size or 0) - 1 for one in store.measurements(samples=False))


def from_table(table: Any) -> list[Measurement]:
    return list(measurements_of(table))
