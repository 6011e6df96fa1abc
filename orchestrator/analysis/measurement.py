"""Build an attempt's ``Measurement``; it has metrics only if every rank left a result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.analysis.samples import NOTHING, derived_figures, metrics_of
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Attempt, RankOutcome
from orchestrator.core.topology import Node
from orchestrator.store.schema import SCHEMA_VERSION
from workloads import registry
from workloads.base import Result, of_ranks

#: Figures that each rank reports once; the gang's figure is the largest.
_LARGEST = (
    *("load_s", "compile_s", "warmup_s", "warmup_steps", "shapes", "shapes_unmet"),
    *("timed_parts", "timed_compilations", "timed_cpu_fallbacks"),
    *("weight_bytes", "parameter_count", "trainable_parameter_count", "train_flops_per_token"),
    *("tokenization_s", "detokenization_s"),
    *("baseline_host_memory_bytes", "peak_host_memory_bytes", "peak_device_memory_bytes"),
)
_OF_JOB = (
    *("experiment", "workload", "model", "dataset", "accelerator", "cards", "precision"),
    *("engine", "isolation", "measure", "replicate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Software versions and commit of the driver; see ``environment.provenance()``."""

    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    git_dirty: bool | None = None


def measurement_of(
    record: RecordRow,
    *,
    run: str,
    invocation_id: str,
    recorded_at: float,
    provenance: Provenance | None = None,
    nodes: Iterable[Node] = (),
) -> Measurement:
    """Return the row of one attempt, or of a job that ends without one.

    ``recorded_at`` is in seconds since the epoch. ``provenance`` and ``nodes`` fill in for workers
    that left nothing and jobs that never ran.
    """
    provenance = provenance or Provenance()
    attempt, job = record.attempt, record.job
    tried = attempt.job if attempt else job
    ranks = sorted(record.outcome.ranks if record.outcome else (), key=lambda rank: rank.rank)
    results = [rank.result for rank in ranks if rank.result is not None]
    samples = tuple((r.rank, s) for r in ranks if r.result for s in r.result.samples)
    items = tuple((r.rank, i) for r in ranks if r.result for i in r.result.items)
    whole = bool(results) and len(results) == len(ranks)
    metrics = NOTHING
    declared = registry.metrics_of(job.workload)
    figures = of_ranks(declared, [result.metrics for result in results])
    if whole:
        figures = derived_figures(declared, samples, items) | figures
        metrics = metrics_of(
            samples,
            items,
            confidence=job.measure.confidence,
            throughput=registry.throughput_of(job.workload),
        )
        metrics = replace(metrics, **_energy(ranks))
    failure = None
    if record.outcome is not None and record.state is not State.SUCCEEDED:
        by_end = sorted(record.outcome.ranks, key=lambda rank: rank.ended_at)
        failure = record.outcome.failure or next((r.failure for r in by_end if r.failure), None)
    by_id = {node.node_id: node for node in nodes}
    return Measurement(
        schema_version=SCHEMA_VERSION,
        run=run,
        invocation_id=invocation_id,
        job_id=attempt.job_id if attempt else job.job_id,
        attempt_id=attempt.attempt_id if attempt else f"{job.job_id}-0",
        attempt_number=attempt.number if attempt else 0,
        final=record.final,
        purpose=attempt.purpose if attempt else "measure",
        recorded_at=to_microseconds(recorded_at),
        **{name: getattr(job, name) for name in _OF_JOB},
        batch_size=tried.batch_size if isinstance(tried.batch_size, int) else None,
        batch_size_requested=str(job.batch_size),
        parameters=dict(job.parameters),
        work_version=registry.work_version(job.workload),
        state=record.state,
        reason=record.reason,
        failure_class=str(failure.failure_class) if failure else None,
        failure_tail=(failure.tail or failure.message) if failure else None,
        log=(failure.log or None) if failure else None,
        started_at=to_microseconds(min((rank.started_at for rank in ranks), default=None)),
        ended_at=to_microseconds(max((rank.ended_at for rank in ranks), default=None)),
        git_commit=provenance.git_commit,
        git_dirty=provenance.git_dirty,
        **_where(attempt, ranks, by_id, job.accelerator),
        **_with_what(ranks, provenance),
        **_processors(ranks),
        metrics=metrics,
        **_numbers(results, record, ranks),
        workload_metrics=figures,
        samples=samples,
        items=items,
        image=next((result.image for result in results if result.image), None),
    )


def to_microseconds(seconds: float | None) -> float | None:
    """Round seconds since the epoch as tables do, so that rows read back as written."""
    return None if seconds is None else round(seconds * 1_000_000) / 1_000_000


def _where(
    attempt: Attempt | None,
    ranks: Sequence[RankOutcome],
    by_id: Mapping[str, Node],
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Return nodes, cards, device, driver and ``emulated``; workers' own reports come first."""
    workers = [rank.worker for rank in ranks if rank.worker is not None]
    cards = attempt.cards if attempt else ()
    known = [by_id[card.node_id] for card in cards if card.node_id in by_id]
    if not cards:
        known = [node for node in by_id.values() if node.accelerator is accelerator]
    names = [by_id[c.node_id].name if c.node_id in by_id else c.node_id for c in cards]
    if workers and len(workers) == len(cards):
        names = [worker.node_name for worker in workers]
    device = workers[0].device_name if workers else known[0].device_name if cards and known else ""
    emulated = [worker.emulated for worker in workers] or [node.emulated for node in known]
    return {
        "nodes": tuple(dict.fromkeys(names)),
        "card_indices": tuple(card.index for card in cards),
        "device_name": device or None,
        "driver_version": (workers[0].driver_version or None) if workers else None,
        # A job that never ran belongs to real cards if there are any.
        "emulated": bool(emulated) and (any(emulated) if cards else all(emulated)),
    }


def _energy(ranks: Sequence[RankOutcome]) -> dict[str, Any]:
    known = [rank.energy for rank in ranks if rank.energy is not None]
    if not known or len(known) < len(ranks):
        return {}
    return {
        "energy_j": math.fsum(energy.energy_j for energy in known),
        "power_w": math.fsum(energy.power_w for energy in known),
        "energy_source": "counter" if all(e.source == "counter" for e in known) else "power",
    }


def _processors(ranks: Sequence[RankOutcome]) -> dict[str, Any]:
    uses = [rank.processor for rank in ranks if rank.processor is not None]
    turns = [rank.turn for rank in ranks if rank.turn is not None]
    columns: dict[str, Any] = {}
    if turns:
        columns["queued_s"] = max(turn.waited_s for turn in turns)
        columns["oversubscribed"] = any(turn.oversubscribed for turn in turns)
    if uses and len(uses) == len(ranks):
        columns["processor_cores"] = min(use.cores for use in uses)
        for name in ("wait_share", "stolen_share", "host_load"):
            values = [getattr(use, name) for use in uses]
            column = "processor_wait_share" if name == "wait_share" else name
            columns[column] = None if None in values else max(values)
    return columns


def _with_what(ranks: Sequence[RankOutcome], provenance: Provenance) -> dict[str, Any]:
    """Return versions and process of the lowest rank that reported them."""
    first = next((rank for rank in ranks if rank.worker is not None), None)
    if first is None or first.worker is None:
        return {"versions": dict(provenance.versions)}
    return {
        "versions": first.worker.versions,
        "worker_pid": first.worker.pid,
        "threads": first.worker.threads,
        "niceness": first.worker.niceness,
        "host_cores": first.worker.cores,
        "jobs_before": max(rank.jobs_before for rank in ranks),
        "model_was_resident": all(rank.model_was_resident for rank in ranks),
    }


def _numbers(
    results: Sequence[Result], record: RecordRow, ranks: Sequence[RankOutcome]
) -> dict[str, Any]:
    """Return the largest figures, which limit a gang, and how ranks of a failed gang ended."""
    columns: dict[str, Any] = {}
    if results:
        first = results[0]
        for name in _LARGEST:
            known = [value for one in results if (value := getattr(one, name)) is not None]
            columns[name] = max(known, default=None)
        columns |= {
            "stop_reason": first.stop_reason,
            "warmup_end": first.warmup_end,
            "random_weights": any(result.random_weights for result in results),
            "synthetic_data": any(result.synthetic_data for result in results),
            "precision_detail": first.precision_detail or None,
            "details": dict(first.details),
        }
    if len(ranks) > 1 and record.state is not State.SUCCEEDED:
        ends = [
            f"rank {rank.rank} {rank.state}"
            + (f" ({rank.failure.failure_class}: {rank.failure.message})" if rank.failure else "")
            for rank in ranks
        ]
        columns["details"] = columns.get("details", {}) | {"ranks": "; ".join(ends)}
    return columns
