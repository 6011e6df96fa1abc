"""Rows for readers that know nothing of the log: a few seconds behind, and rarely written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from driver_cases import MOMENT, FakeClock, Later, job, plan
from measurements import row
from test_driver import Lines, Rows

from orchestrator.core.errors import StoreError, StoreFull
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.driver.board import Board
from orchestrator.driver.stop_signal import Patience, StopSignal
from orchestrator.results import disk, paths
from orchestrator.results.derive import measurement_of
from orchestrator.results.notes import Notes
from orchestrator.results.store import Store
from orchestrator.runtime.parquet_turns import PARQUET_INTERVAL_S
from orchestrator.runtime.row_writer import RowWriter

LOOK_S = 0.5  # of a loop that waits for events
BEHIND_S = 10.0  # of a plain reader, as README promises


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
        notes=Notes(run="night", invocation_id="i"),
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
def test_plain_readers_are_ten_seconds_behind_at_most(
    looks: int | None, trouble: Exception | None
) -> None:
    """With a row at every look, and when no more come; one file in five seconds, the first at once,
    all at the end; a file that found no room, or no memory, is tried again."""
    clock, store, this = FakeClock(), Logged(trouble), job(1)
    writer = writer_of(store, clock, looks, this)

    came: list[float] = []
    for look in range(120):
        if look % 60 < 40:  # then a lull of ten seconds
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
def test_a_record_that_found_no_room_and_stands_nevertheless_is_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int | None
) -> None:
    """Its sync fails, and so does taking it back: the rows are written again as they were, and
    their copies on another disk go."""

    def full(*_: object) -> None:
        broken.setattr(disk, "sync", sync)  # there is room elsewhere
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(paths, "spill_directories", lambda _: [tmp_path / "elsewhere"])
    jobs, sync = [job(size) for size in (1, 2, 3)], disk.sync
    with Store.open(tmp_path, "night") as store:
        clock = FakeClock()
        writer = writer_of(store, clock, looks, *jobs)
        with monkeypatch.context() as broken:
            broken.setattr(disk, "sync", full)
            broken.setattr(disk, "truncate", full)
            writer.take(unrun(jobs[0]))
            writer.take(unrun(jobs[1]))
            for _ in range(4):
                writer.write_soon()
            assert writer.held is not None
            writer.take(unrun(jobs[2]))
            writer.write_soon()
        assert len(list((tmp_path / "elsewhere").iterdir())) == 3
        clock.sleep(60)
        writer.look_for_room()
        assert writer.held is None and not (tmp_path / "elsewhere").exists()
        for _ in range(2):
            found = sorted(each.batch_size or 0 for each in store.measurements())
            assert found == [1, 2, 3]
            writer.save()
            store.to_parquet()


@pytest.mark.parametrize("looks", [None, 1])
def test_a_record_that_was_given_up_and_stands_nevertheless_is_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int | None
) -> None:
    """Its sync fails until patience ends, and so does taking it back; what came meanwhile is
    written apart from it at the end."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "away")

    jobs = [job(size) for size in (1, 2, 3)]
    with Store.open(tmp_path, "night") as store:
        writer = writer_of(store, FakeClock(), looks, *jobs)
        writer.patience.limit_s = 0.0
        store.append(row(3))  # begins the log
        with monkeypatch.context() as broken, pytest.raises(StoreError):
            broken.setattr(disk, "sync", fail)
            broken.setattr(disk, "truncate", fail)
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
    """What was logged before the disk was full is where any reader finds it ten seconds later."""
    clock, store, this = FakeClock(), Logged(None), job(1)
    writer = writer_of(store, clock, looks, this)
    for _ in range(2):  # the first has a file at once
        writer.take(unrun(this))
        for _ in range(6):
            writer.write_soon()
    store.full = True
    writer.take(unrun(this))
    for _ in range(20):
        writer.write_soon()
        clock.sleep(LOOK_S)
    assert writer.held is not None and store.plain == 2
