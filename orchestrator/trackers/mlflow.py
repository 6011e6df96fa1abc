"""``mlflow``: a tracking server or database; one experiment per run, one MLflow run per job.

Rows already written are skipped. The extra ``mlflow`` brings only the client, which reaches
servers; databases need the package ``mlflow``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from pathlib import Path

from orchestrator.trackers.base import TrackedRun, Tracker

ATTEMPT_TAG = "nightgrid.attempt"
_SETTINGS = {
    # Otherwise an unreachable server blocks for minutes,
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # and two lines per job go to standard output.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_PLACES = "name a server, http://HOST:5000, or a database, sqlite:///mlflow.db"
#: The innermost reason in a message that quotes several layers of HTTP.
_UNREACHED = re.compile(r"(?:\[Errno -?\d+\]|Read timed out|timed out|Name or service)[^'\")(]*")


class _Client:
    """One experiment of the tracking server."""

    def __init__(self, uri: str, run: str, _directory: Path) -> None:
        for variable, value in _SETTINGS.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        title = f"nightgrid/{run}"
        experiment = self._client.get_experiment_by_name(title)
        self._experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(title)
        )
        self._known: set[str] = set()
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id], max_results=1000, page_token=token
            )
            self._known |= {run.data.tags.get(ATTEMPT_TAG, "") for run in page}
            if not (token := page.token):
                break

    def has(self, attempt: str) -> bool:
        """Return whether a run has this attempt's tag."""
        return attempt in self._known

    def write(self, tracked: TrackedRun) -> None:
        """Write one run, its tag last as mark of a complete run; delete it on failure."""
        from mlflow.entities import Metric, Param, RunTag

        start_ms, end_ms = round(tracked.started_at * 1000), round(tracked.ended_at * 1000)
        made = self._client.create_run(
            self._experiment_id, start_time=start_ms, run_name=tracked.name
        )
        try:
            self._client.log_batch(
                made.info.run_id,
                metrics=[Metric(k, v, end_ms, 0) for k, v in tracked.metrics.items()],
                params=[Param(k, v) for k, v in tracked.parameters.items()],
                tags=[RunTag(k, v) for k, v in tracked.tags.items()],
            )
            self._client.set_tag(made.info.run_id, ATTEMPT_TAG, tracked.attempt)
            status = "FINISHED" if tracked.succeeded else "FAILED"
            self._client.set_terminated(made.info.run_id, status, end_ms)
        except Exception:
            with contextlib.suppress(Exception):  # the server may be away by now
                self._client.delete_run(made.info.run_id)
            raise
        self._known.add(tracked.attempt)


def _explain(error: Exception, uri: str) -> str:
    text = str(error).strip() or type(error).__name__
    scheme = uri.partition(":")[0].partition("+")[0]
    if scheme in _DATABASES and importlib.util.find_spec("sqlalchemy") is None:
        return (
            "a database needs the whole of MLflow, and mlflow-skinny is the client alone: "
            "pip install mlflow, or name a server, http://HOST:5000"
        )
    if "maintenance mode" in text:
        return (
            f"MLflow writes no plain directories any more; {_PLACES} (MLFLOW_ALLOW_FILE_STORE=true "
            "has it write this one all the same)"
        )
    if "unsupported URI" in text or isinstance(error, ValueError):
        return f"MLflow knows no such address; {_PLACES}"
    if unreached := _UNREACHED.search(text):
        return f"no server answers there: {unreached[0].strip()}"
    return text.splitlines()[0]


SPEC = Tracker(
    name="mlflow",
    title="MLflow",
    package="mlflow",
    destination="a server or database, mlflow=http://HOST:5000",
    variable="MLFLOW_TRACKING_URI",
    connect=_Client,
    explain=_explain,
)
