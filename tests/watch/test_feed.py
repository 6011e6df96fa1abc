"""The feed of the watch page, from real files that change under its hands."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from measurements import row
from patience import patience
from run_directory import RunDirectory

from orchestrator.analysis.summary import STALE_AFTER_S
from orchestrator.core.job import State
from orchestrator.core.measurement import Metrics
from orchestrator.report.run_report import read_summary
from orchestrator.watch import state as feed_module
from orchestrator.watch.state import NEWEST_ROWS, RunFeed, run_entries


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_run_without_a_status_shows_its_rows(directory: RunDirectory) -> None:
    directory.append(0)
    state = RunFeed(directory.store).snapshot()
    assert state["status"] is None and state["stale"] is False
    assert state["row_count"] == 1 and state["states"] == {"SUCCEEDED": 1}
    assert state["sentence"].endswith("it has 1 row.")


def test_a_run_under_way_says_how_far_it_is(directory: RunDirectory) -> None:
    directory.append(*range(30))
    directory.status()
    state = RunFeed(directory.store).snapshot()
    json.dumps(state, allow_nan=False)
    assert state["sentence"] == "Under way: 17 of 48 jobs done, 1 running, about 2 min 10 s left."
    assert state["status"]["assigned"] == 1
    assert state["status"]["jobs_per_h"] == pytest.approx(3600 * 15 / 65, rel=1e-3)
    assert state["emulated"] and not state["stale"]
    assert state["row_count"] == 30 and state["states"] == state["status"]["counts"]


def test_a_finished_run_is_never_stale(directory: RunDirectory) -> None:
    directory.status(at=2000.0, started_at=1000.0, finished=True, stopping="SIGTERM received")
    state = RunFeed(directory.store).snapshot()
    assert not state["stale"]
    assert state["sentence"] == "STOPPED (SIGTERM received): 15 of 48 jobs measured."


@pytest.mark.parametrize(
    ("emulated", "counts", "said"),
    [
        pytest.param(
            True,
            {"SUCCEEDED": 2, "NOT_STARTED": 4},
            "2 of 6 jobs measured",
            id="a real night after an emulated one",
        ),
        pytest.param(
            False,
            {"reused": 3, "NOT_STARTED": 1},
            "3 of 4 jobs measured",
            id="the grid is smaller now",
        ),
    ],
)
def test_every_page_counts_what_the_driver_has_measured(
    directory: RunDirectory, emulated: bool, counts: dict[str, int], said: str
) -> None:
    """Rows may also be of an emulated night before, or of cells that the grid had once."""
    directory.append(*range(6), emulated=emulated, recorded_at=1e9)
    if emulated:
        real = {"emulated": False, "invocation_id": "i2", "attempt_number": 2}
        directory.append(0, 1, **real)
        nothing = {"metrics": Metrics(), "samples": (), "items": (), "started_at": None}
        directory.append(*range(2, 6), **real, state=State.NOT_STARTED, **nothing)
        states = RunFeed(directory.store).snapshot()["states"]
        assert states == {"NOT_STARTED": 4, "SUCCEEDED": 2}, "each job once"
    total = sum(counts.values())
    ended = {"total": total, "done": total, "counts": counts, "stopping": "SIGINT received"}
    directory.status(**ended, finished=True)
    sentence = RunFeed(directory.store).snapshot()["sentence"]
    summary, _ = read_summary(directory.store)
    assert sentence == summary.verdict == f"STOPPED (SIGINT received): {said}."
    (entry,) = run_entries(directory.store.path.parent, 1)
    assert f"{entry.succeeded} of {entry.total} jobs measured" == said


def test_silence_is_measured_by_our_own_clock_once_the_status_was_seen_to_change(
    directory: RunDirectory,
) -> None:
    now = [0.0]
    feed = RunFeed(directory.store, clock=lambda: 10_000.0, steady=lambda: now[0])
    directory.status(at=6400.0, started_at=6300.0)
    assert feed.snapshot()["silent_s"] == 3600.0  # nothing better is known yet
    assert feed.snapshot()["stale"]
    now[0] = 2.0
    directory.status(at=6402.0, started_at=6300.0)
    assert feed.snapshot()["silent_s"] == 0.0 and not feed.snapshot()["stale"]
    now[0] = 2.0 + STALE_AFTER_S + 1
    state = feed.snapshot()
    assert state["stale"] and state["silent_s"] == STALE_AFTER_S + 1
    assert "Not finished" in state["sentence"] and "silent for" in state["sentence"]


def test_a_status_that_is_not_understood_leaves_the_last_good_one(directory: RunDirectory) -> None:
    directory.status()
    feed = RunFeed(directory.store)
    feed.snapshot()
    directory.store.write_file("status.json", '{"version": 1, "run"')
    state = feed.snapshot()
    assert state["status"]["done"] == 17 and "not understood" in state["trouble"][0]
    directory.status(done=18)
    assert feed.snapshot()["status"]["done"] == 18 and not feed.snapshot()["trouble"]


def test_rows_come_newest_first_and_only_so_many(directory: RunDirectory) -> None:
    directory.append(*range(NEWEST_ROWS + 3))
    feed = RunFeed(directory.store)
    assert feed.snapshot()["row_count"] == NEWEST_ROWS + 3
    directory.append(0, recorded_at=4e9, invocation_id="i2", state=State.FAILED, reason="a\nb")
    rate = Metrics(throughput=12.5, throughput_unit="samples/s", relative_half_width=0.021)
    gang = {"cards": 2, "card_indices": (0, 1), "metrics": rate, "final": False}
    directory.append(0, recorded_at=5e9, attempt_number=2, **gang)
    state = feed.snapshot()
    assert len(state["rows"]) == NEWEST_ROWS
    probe, failed, measured = state["rows"][:3]
    assert (failed["state"], failed["reason"], failed["where"]) == ("FAILED", "a b", "hpu-1/HPU0")
    assert measured["figure"] == f"{100 + NEWEST_ROWS + 2:.1f} tokens/s"
    assert probe["where"] == "hpu-1/HPU0 and 1 more" and probe["final"] is False
    assert probe["figure"] == "12.50 samples/s ±2.1%"
    assert state["states"] == {"SUCCEEDED": NEWEST_ROWS + 2, "FAILED": 1}


def test_only_files_that_came_since_are_read(directory: RunDirectory) -> None:
    directory.append(0)
    feed = RunFeed(directory.store)
    feed.snapshot()
    directory.append(1)
    with directory.store:
        directory.store.compact()
    assert feed.snapshot()["row_count"] == 2
    (first,) = directory.store.tables_path.glob("*.parquet")
    directory.append(2)
    first.write_bytes(b"damaged since")
    state = feed.snapshot()
    assert (state["row_count"], state["damaged"]) == (3, 0)
    assert RunFeed(directory.store).snapshot()["damaged"] == 1


def test_the_status_does_not_wait_for_thousands_of_rows(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.append(0)
    directory.status()
    slow = threading.Event()
    monkeypatch.setattr(feed_module, "READING_PATIENCE_S", 0.01)
    read = feed_module.read_rows

    def read_slowly(*arguments: object) -> object:
        slow.wait(patience(30))
        return read(*arguments)

    monkeypatch.setattr(feed_module, "read_rows", read_slowly)
    feed = RunFeed(directory.store)
    state = feed.snapshot()
    assert state["reading"] and state["row_count"] == 0 and state["status"]["done"] == 17
    slow.set()
    monkeypatch.setattr(feed_module, "READING_PATIENCE_S", 30.0)
    state = feed.snapshot()
    assert not state["reading"] and state["row_count"] == 1


def test_jobs_have_the_labels_of_the_report(directory: RunDirectory) -> None:
    directory.append(0, precision="bf16", parameters={"output_tokens": 8})
    directory.append(1, precision="fp16", parameters={"output_tokens": 8})
    directory.append(2, precision="fp16", parameters={"output_tokens": 32}, cards=2)
    directory.append(2, final=False, attempt_number=2, precision="fp16", cards=2)
    shown = [row["job"] for row in RunFeed(directory.store).snapshot()["rows"]]
    summary, _ = read_summary(directory.store)
    labels = [str(label) for label in summary.labels.values()]
    assert set(shown) == set(labels) and len(shown) == 4 and len(set(labels)) == 3
    assert "output tokens 32" in max(labels, key=len) and row().model not in "".join(labels)
