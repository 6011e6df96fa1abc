"""Rows for readers that know nothing of the log: a few seconds behind, and rarely written."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
from driver_cases import MOMENT, FakeClock, Later, attempt, job, node, plan
from measurements import row
from test_driver_loop import Lines, Rows

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.errors import StoreError, StoreFull, StoreLocked
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Outcome
from orchestrator.driver.board import Board
from orchestrator.driver.rows import PARQUET_INTERVAL_S, RowWriter
from orchestrator.driver.stop_signal import Patience, StopSignal
from orchestrator.store import disk
from orchestrator.store.disk import write_error
from orchestrator.store.store import Store

LOOK_S = 0.5  # of a loop that waits for events
BEHIND_S = 15.0  # of a plain reader, as README promises


class Logged(Rows):
    """Rows, and how many of them a plain reader finds; the first file fails."""

    full = False

    def __init__(self, trouble: Exception | None) -> None:
        super().__init__()
        self.plain = self.files = 0  # type: ignore[assignment]
        self._trouble = trouble

    def append(self, *measurements: Measurement) -> None:
        """Keep rows, or find no room."""
        if self.full:
            raise StoreFull("no space left")
        super().append(*measurements)

    def to_parquet(self) -> None:
        """Show all rows, or fail."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble
        self.plain, self.files = len(self.kept), self.files + 1  # type: ignore[operator, assignment]


def writer_of(store: Any, clock: FakeClock, looks: int | None, *jobs: Job) -> RowWriter:
    """A writer in the loop, or beside it, which is seen after so many looks."""
    view = Lines()
    return RowWriter(
        store=store,
        to_measurement=lambda record: measurement_of(
            record, run="night", invocation_id="i", recorded_at=clock()
        ),
        board=Board(run="night", plan=plan(*jobs), started_at=MOMENT),
        view=view,
        patience=Patience(view=view, stop=StopSignal(), clock=clock, sleep=clock.sleep),
        clock=clock,
        wall=clock,
        thread=None if looks is None else Later(looks),
    )


def unrun(job: Job) -> RecordRow:
    return RecordRow(job=job, state=State.NOT_STARTED, reason="no time is left", final=True)


@pytest.mark.parametrize("looks", [None, 1, 3])
@pytest.mark.parametrize("trouble", [None, StoreFull("no space left"), MemoryError()])
def test_plain_readers_are_fifteen_seconds_behind_at_most(
    looks: int | None, trouble: Exception | None
) -> None:
    """With a row at every look, and when no more come; one file in ten seconds, the first at once,
    all at the end; a file that found no room, or no memory, is tried again."""
    clock, store, this = FakeClock(), Logged(trouble), job(1)
    writer = writer_of(store, clock, looks, this)

    came: list[float] = []
    for look in range(120):
        if look % 60 < 40:  # then a lull
            came.append(clock())
            writer.take(unrun(this))
        writer.write_soon()
        clock.sleep(LOOK_S)
        late = [at for at in came[store.plain :] if clock() - at > BEHIND_S]
        assert not late, f"{clock() - late[0]} s behind"
    assert len(store.kept) == store.plain == len(came)
    assert 1 < store.files <= 60 / PARQUET_INTERVAL_S + 1  # type: ignore[operator]
    writer.take(unrun(this))
    writer.save()
    assert len(store.kept) == store.plain == len(came) + 1


@pytest.mark.parametrize("looks", [None, 1])
def test_a_batch_that_found_no_room_and_stands_nevertheless_is_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int | None
) -> None:
    """Its sync fails: the rows are written again as they were."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    jobs = [job(size) for size in (1, 2, 3)]
    with Store.open(tmp_path, "night") as store:
        clock = FakeClock()
        writer = writer_of(store, clock, looks, *jobs)
        with monkeypatch.context() as broken:
            broken.setattr(disk, "sync", full)
            writer.take(unrun(jobs[0]))
            writer.take(unrun(jobs[1]))
            for _ in range(4):
                writer.write_soon()
            assert writer.delayed is not None
            writer.take(unrun(jobs[2]))
            writer.write_soon()
        clock.sleep(60)
        writer.look_for_room()
        assert writer.delayed is None
        for _ in range(2):
            found = sorted(each.batch_size or 0 for each in store.measurements())
            assert found == [1, 2, 3]
            writer.save()
            store.to_parquet()


@pytest.mark.parametrize("looks", [None, 1])
def test_a_batch_that_was_given_up_and_stands_nevertheless_is_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int | None
) -> None:
    """Its sync fails until patience ends; what came meanwhile is written with it at the end."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "away")

    jobs = [job(size) for size in (1, 2, 3)]
    with Store.open(tmp_path, "night") as store:
        writer = writer_of(store, FakeClock(), looks, *jobs)
        writer.patience.limit_s = 0.0
        store.append(row(3))  # begins the log
        with monkeypatch.context() as broken, pytest.raises(StoreError):
            broken.setattr(disk, "sync", fail)
            writer.take(unrun(jobs[0]))
            writer.take(unrun(jobs[1]))
            for _ in range(4):
                writer.write_soon()
        writer.take(unrun(jobs[2]))
        for _ in range(2):
            writer.save()
            assert sorted(each.batch_size or 0 for each in store.measurements()) == [1, 2, 3, 4]


@pytest.mark.parametrize("looks", [None, 1])
def test_rows_become_parquet_while_others_find_no_room(looks: int | None) -> None:
    """What was logged before the disk was full is where any reader finds it a moment later."""
    clock, store, this = FakeClock(), Logged(None), job(1)
    writer = writer_of(store, clock, looks, this)
    for _ in range(2):  # the first has a file at once
        writer.take(unrun(this))
        for _ in range(6):
            writer.write_soon()
    store.full = True
    writer.take(unrun(this))
    for _ in range(30):
        writer.write_soon()
        clock.sleep(LOOK_S)
    assert writer.delayed is not None and store.plain == 2


def full(number: int) -> StoreError:
    """The error for a file of this number that found no room, as the store raises it."""
    origin = OSError(errno.ENOSPC, "no space left")
    error = write_error(Path(f"rows-{number}.parquet"), origin)
    error.__cause__ = origin
    return error


@pytest.mark.parametrize(
    ("troubles", "messages"),
    [
        ([full(0), full(1), full(2)], 1),
        ([full(0), StoreError("not the writer"), full(1), MemoryError()], 3),
        ([full(0), None, full(1)], 2),
        ([StoreLocked("taken over")], 0),
    ],
    ids=["one cause", "several", "it came back", "another driver's"],
)
def test_a_cause_for_which_no_parquet_is_made_is_said_once(
    troubles: list[Exception | None], messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Though each file has another name; again where it comes back after a file was made."""
    caplog.set_level(logging.WARNING, logger="nightgrid.store")
    clock, store, this = FakeClock(), Logged(None), job(1)
    left = list(troubles)

    def to_parquet() -> None:
        if left and (trouble := left.pop(0)) is not None:
            raise trouble

    store.to_parquet = to_parquet  # type: ignore[method-assign]
    writer = writer_of(store, clock, None, this)
    for _ in range(len(troubles) + 1):
        writer.take(unrun(this))
        writer.write_soon()
        clock.sleep(PARQUET_INTERVAL_S)
    assert len(caplog.records) == messages


@pytest.mark.parametrize("looks", [None, 1])
def test_agents_hear_of_rows_that_are_safe(looks: int | None) -> None:
    """Not before they are, and not of rows without an attempt."""
    clock, store, this = FakeClock(), Logged(None), job(1)
    writer = writer_of(store, clock, looks, this)
    safe: list[str] = []
    writer.durable = safe.extend
    store.full = True
    tried = attempt(this, node().cards[0])
    outcome = Outcome(attempt_id=tried.attempt_id, state=State.LOST, ranks=())
    lost = RecordRow(
        job=this, state=State.LOST, reason="x", final=False, attempt=tried, outcome=outcome
    )
    writer.take(lost)
    writer.take(unrun(this))
    for _ in range(4):
        writer.write_soon()
    assert writer.delayed is not None and safe == []
    store.full = False
    clock.sleep(60)
    writer.look_for_room()
    assert safe == [tried.attempt_id] and writer.delayed is None
