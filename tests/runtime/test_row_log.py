"""Rows go to a tracker as they come; what fails there ends no run and is brought later."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from measurements import row

from orchestrator.results.store import Store
from orchestrator.runtime import row_log
from orchestrator.runtime.row_log import RowLog
from orchestrator.trackers import mlflow
from orchestrator.trackers.base import TrackedRun, Tracker, tracked


@dataclass
class Kept:
    """A tracker in memory, which fails as often as it is told to."""

    runs: list[TrackedRun] = field(default_factory=list)
    failures: int = 0
    came: threading.Event = field(default_factory=threading.Event)
    stuck: threading.Event | None = None
    refused: set[str] = field(default_factory=set)  # jobs

    def tracker(self) -> Tracker:
        return Tracker(
            name="kept",
            title="Kept",
            package="sys",
            extra="",
            destination="anything",
            variable="KEPT",
            connect=lambda *_: self,
            explain=lambda error, destination: f"it says {error}",
        )

    def has(self, attempt: str) -> bool:
        return attempt in {run.attempt for run in self.runs}

    def write(self, tracked: TrackedRun) -> None:
        if self.stuck is not None:
            self.stuck.wait()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no")
        if tracked.tags["nightgrid.job_id"] in self.refused:
            raise RuntimeError("never")
        self.runs.append(tracked)
        self.came.set()


@pytest.fixture()
def store(tmp_path: Path) -> Store:
    """A run whose earlier driver wrote one row."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0, run="night"))
    return store


def attempts(kept: Kept) -> list[str]:
    """The jobs that it has, in their order."""
    return [run.tags["nightgrid.job_id"] for run in kept.runs]


def test_each_final_row_is_logged_once_those_of_earlier_drivers_first(store: Store) -> None:
    """A row that the store has and that comes as well is one run; an attempt before the last is
    none."""
    kept = Kept()
    log = RowLog(store, kept.tracker(), "there")
    log.start()
    for each in (row(0), row(1), replace(row(2), final=False), row(3)):
        log.take(each)
    assert log.close() == "every row is in Kept at there"
    assert attempts(kept) == [row(number).job_id for number in (0, 1, 3)]


def test_a_tracker_that_fails_is_tried_again(store: Store) -> None:
    """The trouble is said with the destination, and no row is missed."""
    kept = Kept(failures=2)
    log = RowLog(store, kept.tracker(), "there", again_s=0.01)
    log.start()
    log.take(row(1))
    assert kept.came.wait(60)
    assert log.close() == "every row is in Kept at there"
    assert set(attempts(kept)) == {row(0).job_id, row(1).job_id}


def test_rows_that_a_tracker_refuses_hold_up_no_other(store: Store) -> None:
    """However many come first: they are counted and named at the end, and each is written a few
    times, not for ever."""
    kept = Kept(refused={row(number).job_id for number in (0, 1, 2, 3, 5)})
    log = RowLog(store, kept.tracker(), "there", again_s=0.01)
    log.start()
    for number in range(1, 7):
        log.take(row(number))
    assert kept.came.wait(60)
    told = log.close()
    assert "every row is in Kept at there but 5 rows that it refused, first " in told
    assert "it says never" in told
    assert sorted(attempts(kept)) == sorted(row(number).job_id for number in (4, 6))


def test_what_a_tracker_lacks_at_the_end_is_said_with_the_command_that_brings_it(
    store: Store,
) -> None:
    """The reason, the destination, and `nightgrid export`."""
    log = RowLog(store, Kept(failures=9).tracker(), "there", again_s=3600)
    log.start()
    assert log.close() == (
        "some rows were not logged: Kept at there: it says no; "
        "nightgrid export there --to kept --run night brings them"
    )


def test_a_tracker_that_hangs_holds_up_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits for it as long as is said, and no longer."""
    monkeypatch.setattr(row_log, "HURRIED_S", 0.05)
    kept = Kept(stuck=threading.Event())
    log = RowLog(store, kept.tracker(), "there")
    log.start()
    told = log.close(hurry=True)
    assert "takes longer than 0.05 s" in told and "nightgrid export there" in told
    kept.stuck.set()


class RefusingClient:
    """A client of an MLflow server that takes no batch; ``runs`` are those that are there."""

    runs: ClassVar[list[str]] = []

    def __init__(self, tracking_uri: str) -> None:
        self.uri = tracking_uri

    def get_experiment_by_name(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id="0")

    def search_runs(self, *_: object, **__: object) -> Any:
        return type("Page", (list,), {"token": None})()

    def create_run(self, *_: object, **__: object) -> SimpleNamespace:
        self.runs.append("r1")
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_batch(self, *_: object, **__: object) -> None:
        assert self.runs == ["r1"]
        raise RuntimeError("a parameter is too long")

    def delete_run(self, run_id: str) -> None:
        self.runs.remove(run_id)


def test_a_row_that_mlflow_refuses_leaves_no_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try would leave one that seems to run."""
    monkeypatch.setattr(pytest.importorskip("mlflow"), "MlflowClient", RefusingClient)
    for name in ("HTTP_REQUEST_MAX_RETRIES", "HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "1")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    connection = mlflow.SPEC.connect("http://there", "night", tmp_path)
    each = tracked(row(0))
    with pytest.raises(RuntimeError, match="too long"):
        connection.write(each)
    assert RefusingClient.runs == [] and not connection.has(each.attempt)
