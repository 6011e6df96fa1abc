"""Results in an MLflow tracking server: one experiment a run, one MLflow run a job.

The newest final row of each job becomes a run with the job's settings as parameters, what was
derived as metrics, and provenance as tags, ``emulated``, ``random_weights`` and ``synthetic_data``
among them. A row that is there already (by its attempt) is left alone, so exporting again after
the night went on adds what is new. Needs the extra ``mlflow``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement, Metrics
from orchestrator.errors import ExtraMissing, StoreError

if TYPE_CHECKING:
    from mlflow import MlflowClient

ATTEMPT_TAG = "nightgrid.attempt"
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
_LONGEST = 500  # characters of a parameter or tag; servers refuse much longer ones
_MEASURED = ("load_s", "compile_s", "warmup_s", "weight_bytes", "parameter_count",
             "peak_host_memory_bytes", "peak_device_memory_bytes")  # fmt: skip


def export_mlflow(results: Path, uri: str, runs: Iterable[str] = ()) -> dict[str, int]:
    """Write to the tracking server at ``uri``; by run, how many jobs were new there.

    Raises:
        ExtraMissing: mlflow is not installed.
        StoreError: there are no runs, one cannot be read, or the server refuses.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise ExtraMissing("mlflow", extra="mlflow", wanted_for="Exports to MLflow") from error
    from orchestrator.report.grouping import newest_final
    from orchestrator.results.finding import existing_runs, find_run

    names = list(runs) or sorted(existing_runs(results))
    for variable, value in _PATIENCE.items():  # else a server that is away is asked for minutes
        os.environ.setdefault(variable, value)
    written = {}
    try:
        client = MlflowClient(tracking_uri=uri)
        for name in names:
            rows = newest_final(find_run(name, results).measurements(samples=False))
            written[name] = _export_run(client, name, rows)
    except (MlflowException, ValueError) as error:  # a ValueError: no address looks like this
        raise StoreError(f"MLflow at {uri}: {error}") from error
    return written


def parameters_of(row: Measurement) -> dict[str, str]:
    """Parameters of an MLflow run: the identity of the job."""
    told: dict[str, object] = {
        "workload": row.workload,
        "model": row.model,
        "dataset": row.dataset,
        "accelerator": row.accelerator,
        "cards": row.cards,
        "precision": row.precision,
        "batch_size": row.batch_size_requested,
        "engine": row.engine,
        "isolation": row.isolation,
    }
    told |= {f"parameters.{name}": value for name, value in sorted(row.parameters.items())}
    return {name: str(value)[:_LONGEST] for name, value in told.items() if value is not None}


def metrics_of_row(row: Measurement) -> dict[str, float]:
    """Every finite number that was derived or measured."""
    told = {field.name: getattr(row.metrics, field.name) for field in fields(Metrics)}
    told |= {name: getattr(row, name) for name in _MEASURED}
    return {
        name: float(value)
        for name, value in told.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def tags_of(row: Measurement) -> dict[str, str]:
    """Tags of an MLflow run: its end, its place and versions, and what is not real about it."""
    told: dict[str, object] = {
        ATTEMPT_TAG: f"{row.invocation_id}/{row.attempt_id}",
        "nightgrid.job_id": row.job_id,
        "nightgrid.experiment": row.experiment,
        "state": row.state,
        "reason": row.reason or None,
        "emulated": row.emulated,
        "random_weights": row.random_weights,
        "synthetic_data": row.synthetic_data,
        "device": row.device_name,
        "nodes": ", ".join(row.nodes) or None,
        "throughput_unit": row.metrics.throughput_unit or None,
        "git_commit": row.git_commit,
    }
    told |= {f"version.{name}": value for name, value in sorted(row.versions.items())}
    return {name: _tag(value) for name, value in told.items() if value is not None}


def _tag(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)[:_LONGEST]


def _export_run(client: MlflowClient, name: str, rows: Iterable[Measurement]) -> int:
    from mlflow.entities import Metric, Param, RunTag

    title = f"nightgrid/{name}"
    experiment = client.get_experiment_by_name(title)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(title)
    known = _known(client, experiment_id)
    count = 0
    for row in rows:
        tags = tags_of(row)
        if tags[ATTEMPT_TAG] in known:
            continue
        at = row.ended_at or row.recorded_at or 0.0
        start_ms, end_ms = round((row.started_at or at) * 1000), round(at * 1000)
        label = f"{row.model} {row.precision} b={row.batch_size_requested}"
        made = client.create_run(experiment_id, start_time=start_ms, run_name=label[:_LONGEST])
        client.log_batch(
            made.info.run_id,
            metrics=[Metric(k, v, end_ms, 0) for k, v in metrics_of_row(row).items()],
            params=[Param(k, v) for k, v in parameters_of(row).items()],
            # The attempt's tag goes last and alone: a run without it was cut short.
            tags=[RunTag(k, v) for k, v in tags.items() if k != ATTEMPT_TAG],
        )
        client.set_tag(made.info.run_id, ATTEMPT_TAG, tags[ATTEMPT_TAG])
        status = "FINISHED" if row.state is State.SUCCEEDED else "FAILED"
        client.set_terminated(made.info.run_id, status, end_ms)
        count += 1
    return count


def _known(client: MlflowClient, experiment_id: str) -> set[str]:
    """The attempts that the experiment has already."""
    found: set[str] = set()
    token = None
    while True:
        page = client.search_runs([experiment_id], max_results=1000, page_token=token)
        found |= {run.data.tags[ATTEMPT_TAG] for run in page if ATTEMPT_TAG in run.data.tags}
        token = page.token
        if not token:
            return found
