"""Rows go to a tracker as they come; what fails there ends no run and is brought later."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_workload
from measurements import row
from patience import patience

from orchestrator.core.measurement import Measurement
from orchestrator.driver import run
from orchestrator.driver.options import RunOptions
from orchestrator.store.store import Store
from orchestrator.trackers import base
from orchestrator.trackers.base import (
    TRACKERS,
    Backlog,
    RowLog,
    TrackedRun,
    Tracker,
    close_all,
    tracked,
)


@dataclass
class Kept:
    runs: list[TrackedRun] = field(default_factory=list)
    failures: int = 0
    refused: Collection[str] = ()  # ids of jobs
    refusals: int = 0
    connections: int = 0
    came: threading.Event = field(default_factory=threading.Event)
    stuck: threading.Event | None = None

    def tracker(self) -> Tracker:
        return Tracker(
            name="kept",
            title="Kept",
            package="sys",
            destination="anything",
            variable="KEPT",
            connect=self.connect,
            explain=lambda error, destination: f"it says {error}",
        )

    def connect(self, *_: object) -> Kept:
        self.connections += 1
        return self

    def has(self, attempt: str) -> bool:
        return attempt in {run.attempt for run in self.runs}

    def write(self, tracked: TrackedRun) -> None:
        if self.stuck is not None:
            self.stuck.wait()
        if tracked.tags["nightgrid.job_id"] in self.refused:
            self.refusals += 1
            raise ValueError("not this one")
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no")
        self.runs.append(tracked)
        self.came.set()


@pytest.fixture()
def store(tmp_path: Path) -> Store:
    with Store(tmp_path, "night") as store:
        store.append(row(0, run="night"))
    return store


def started(store: Store, tracker: Tracker, **options: float) -> RowLog:
    log = RowLog(store, tracker, "there", **options)
    log.start()
    return log


def finished(kept: Kept, directory: Path, rows: list[Measurement]) -> Backlog:
    done = Backlog(kept.tracker(), "there", "night", directory)
    done.rows.extend(rows)
    done.finish()
    return done


def close(log: RowLog, *, hurry: bool = False) -> str:
    return close_all([log], hurry=hurry)[0]


def attempts(kept: Kept) -> list[str]:
    return [run.tags["nightgrid.job_id"] for run in kept.runs]


def test_each_final_row_is_logged_once_those_of_earlier_drivers_first(store: Store) -> None:
    kept = Kept()
    log = started(store, kept.tracker())
    for each in (row(0), row(1), replace(row(2), final=False), row(3)):
        log.take(each)
    assert close(log) == "every row is in Kept at there"
    assert attempts(kept) == [row(number).job_id for number in (0, 1, 3)]


def test_a_tracker_that_fails_is_tried_again(store: Store) -> None:
    kept = Kept(failures=2)
    log = started(store, kept.tracker(), again_s=0.01)
    log.take(row(1))
    assert kept.came.wait(60)
    assert close(log) == "every row is in Kept at there"
    assert set(attempts(kept)) == {row(0).job_id, row(1).job_id}


def test_a_tracker_that_refuses_any_row_is_not_asked_about_each(tmp_path: Path) -> None:
    kept = Kept(failures=1000)
    rows = [row(number) for number in range(30)]
    done = finished(kept, tmp_path, rows)
    assert kept.connections == base.MOST_IN_A_ROW and done.written == 0
    assert done.refusals.startswith("30 set aside (")
    assert done.refusals.endswith(
        "Kept at there: it says no; 5 in a row failed, so no more were tried"
    )


@pytest.mark.parametrize(
    "refused", [range(12), range(3, 19), range(48, 60), [*range(9), *range(50, 58)]]
)
def test_neighbours_that_are_all_refused_hold_up_no_other(tmp_path, refused) -> None:
    """An experiment's rows may have what a tracker refuses, and lie beside each other."""
    rows = [row(number) for number in range(60)]
    kept = Kept(refused=[rows[number].job_id for number in refused])
    done = finished(kept, tmp_path, rows)
    assert set(attempts(kept)) == {each.job_id for each in rows} - {*kept.refused}
    assert done.refusals.startswith(f"{len(refused)} set aside (")
    assert kept.connections < 2 * len(refused)


@pytest.mark.parametrize("failures", [10_000, 5])
def test_a_tracker_that_refuses_any_row_has_one_more_try_at_the_end(store, failures) -> None:
    with store:
        for number in range(1, 9):
            store.append(row(number, run="night"))
    kept = Kept(failures=failures)
    log = started(store, kept.tracker())
    log.take(row(9))
    until = time.monotonic() + patience(20)
    while kept.failures > failures - 5 and time.monotonic() < until:
        time.sleep(0.005)
    assert not kept.runs
    told = close(log)
    if failures == 5:
        assert told == "every row is in Kept at there"
        assert set(attempts(kept)) == {row(number).job_id for number in range(10)}
    else:
        assert kept.connections == 10 and told.count("it says no") == 1
        assert "10 set aside (" in told and "5 in a row failed" in told


@pytest.mark.parametrize("reached", [True, False])
def test_what_a_tracker_lacks_at_the_end_is_said_with_the_command_that_brings_it(
    store: Store, reached: bool
) -> None:
    tracker = Kept(failures=9).tracker()
    lacks = f"1 set aside ({row(0).job_id}): Kept at there: it says no"
    if not reached:
        tracker = replace(tracker, connect=lambda *_: 1 / 0)
        lacks = "Kept at there: it says division by zero"
    command = "nightgrid export there --to kept --run night brings them"
    told = close(started(store, tracker, again_s=3600))
    assert told == f"some rows were not logged: {lacks}; {command}"


def test_a_tracker_that_hangs_holds_up_nothing(store, monkeypatch) -> None:
    monkeypatch.setattr(base, "HURRIED_S", 0.05)
    kept = Kept(stuck=threading.Event())
    log = started(store, kept.tracker())
    told = close(log, hurry=True)
    assert "takes longer than 0.05 s" in told and "nightgrid export there" in told
    kept.stuck.set()


def test_all_logs_are_ended_before_one_is_waited_for(store: Store) -> None:
    """The first writes its row only when the second is told the end: one after the other they would
    take the first one's whole time."""
    slow, quick = Kept(stuck=threading.Event()), Kept()

    class Second(RowLog):
        def end(self) -> None:
            super().end()
            assert slow.stuck is not None
            slow.stuck.set()

    logs = [RowLog(store, slow.tracker(), "there"), Second(store, quick.tracker(), "there")]
    for log in logs:
        log.start()
    assert close_all(logs, hurry=False) == ["every row is in Kept at there"] * 2


def test_a_run_that_fails_brings_its_rows_before_it_says_so(tmp_path, monkeypatch) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "name: night\nexperiments:\n"
        "  - {name: e, workload: tiny, model: tiny-chatglm3, accelerator: HPU}\n"
    )
    kept = Kept()
    said: list[str] = []
    hurried: list[bool] = []

    class Failing:
        def __init__(self, *, logged: Callable[[Measurement], object], **_: object) -> None:
            self.logged = logged

        def drive(self) -> None:
            self.logged(row(1))
            raise RuntimeError("the driver fails")

    def closing(logs: list[RowLog], *, hurry: bool) -> list[str]:
        hurried.append(hurry)
        return close_all(logs, hurry=hurry)

    tiny_workload.register(monkeypatch)
    monkeypatch.setattr(run, "tracker_of", lambda text: (kept.tracker(), text))
    monkeypatch.setattr(run, "Driver", Failing)
    monkeypatch.setattr(run, "close_all", closing)
    options = RunOptions(results=tmp_path, in_process=True, quiet=True, log_to=("there",))
    with pytest.raises(RuntimeError, match="the driver fails"):
        run.run_grid(grid, options, said.append)
    assert attempts(kept) == [row(1).job_id]
    assert said[-1] == "every row is in Kept at there" and hurried == [True]


class Run:
    def __init__(self, ended: list[int], refuses: bool) -> None:
        self.summary: dict[str, float] = {}
        self.ended = ended
        if refuses:
            del self.summary

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


def wandb(monkeypatch: pytest.MonkeyPatch, run: Run, login: bool = True) -> dict[str, object]:
    """Stand in for the package; return what its ``init`` was given."""
    asked: dict[str, object] = {}

    def init(**given: object) -> Run:
        asked.update(given)
        return run

    package = SimpleNamespace(login=lambda **_: login, Settings=lambda **_: None, init=init)
    monkeypatch.setitem(sys.modules, "wandb", package)
    return asked


@pytest.mark.parametrize("refuses", [False, True])
def test_a_run_is_noted_where_the_package_made_no_directory(refuses, tmp_path, monkeypatch) -> None:
    ended: list[int] = []
    wandb(monkeypatch, Run(ended, refuses))
    one = tracked(row(1))
    connection = TRACKERS["wandb"].connect("there", "night", tmp_path / "night")
    if refuses:
        with pytest.raises(AttributeError, match="summary"):
            connection.write(one)
    else:
        connection.write(one)
    again = TRACKERS["wandb"].connect("there", "night", tmp_path / "night")
    assert again.has(one.attempt) is not refuses
    assert ended == [int(refuses)]


@pytest.mark.parametrize(
    ("login", "variable", "mode"),
    [(True, "", None), (False, "", "offline"), (False, "disabled", None)],
)
def test_without_a_key_files_alone_are_written(login, variable, mode, tmp_path, monkeypatch):
    asked = wandb(monkeypatch, Run([], refuses=False), login)
    monkeypatch.setenv("WANDB_MODE", variable)
    one = replace(row(1), model="Org/Model", emulated=True, random_weights=False)
    TRACKERS["wandb"].connect("there", "night", tmp_path).write(tracked(one))
    assert asked["mode"] == mode
    assert asked["tags"] == ["emulated"]
    config = asked["config"]
    assert isinstance(config, dict) and config["model"] == "Org/Model"
    assert (config["emulated"], config["random_weights"]) == ("true", "false")
