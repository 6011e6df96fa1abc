"""Rows reach the disk once, readers soon, and a full disk only makes the run wait."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_cases import MOMENT, FakeClock, FakeExecutor, attempt, job, node, plan
from measurements import row
from small_disks import FILLER, fill, small_disk
from test_driver_loop import Lines, Rows, driver_of

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.errors import StoreError, StoreFull, StoreLocked
from orchestrator.core.events import RecordRow, RunAttempt, StartWorker
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Outcome
from orchestrator.core.status import RunStatus
from orchestrator.driver.board import Board
from orchestrator.driver.rows import PARQUET_INTERVAL_S, Patience, RowWriter
from orchestrator.driver.supervisor import StopSignal
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.store import disk as disk_calls
from orchestrator.store.disk import write_error
from orchestrator.store.store import Store

LOOK_S = 0.5  # of a loop that waits for events
BEHIND_S = 15.0  # of a plain reader, as README promises
ONE = job(1)


class Logged(Rows):
    """Rows, and how many of them a plain reader finds; ``troubles`` are of the first files."""

    def __init__(self, *troubles: Exception | None) -> None:
        super().__init__()
        self.plain = self.made = 0
        self.full = self.full_for_notes = False
        self._troubles = list(troubles)

    def begin(self, *rows: Measurement) -> None:
        if self.full_for_notes:
            raise StoreFull("no space left")

    def append(self, *measurements: Measurement) -> None:
        if self.full:
            raise StoreFull("no space left")
        super().append(*measurements)

    def to_parquet(self) -> None:
        if self._troubles and (trouble := self._troubles.pop(0)) is not None:
            raise trouble
        self.plain, self.made = len(self.kept), self.made + 1


def writer_of(store: Any, clock: FakeClock, *jobs: Job) -> RowWriter:
    view = Lines()
    return RowWriter(
        store=store,
        to_measurement=lambda record: measurement_of(
            record, run="night", invocation_id="i", recorded_at=clock()
        ),
        board=Board(run="night", plan=plan(*jobs or (ONE,)), started_at=MOMENT),
        view=view,
        patience=Patience(view=view, stop=StopSignal(), clock=clock, sleep=clock.sleep),
        clock=clock,
        wall=clock,
    )


def write(writer: RowWriter, *jobs: Job, times: int = 1) -> None:
    """Take the rows of jobs that did not run, and look so many times whether they are written."""
    for each in jobs:
        record = RecordRow(job=each, state=State.NOT_STARTED, reason="no time is left", final=True)
        writer.take(record)
    for _ in range(times):
        writer.write()


def sizes(store: Store) -> list[int]:
    return sorted(each.batch_size or 0 for each in store.measurements())


@pytest.mark.parametrize("trouble", [None, StoreFull("no space left"), MemoryError()])
def test_plain_readers_are_fifteen_seconds_behind_at_most(
    trouble: Exception | None,
) -> None:
    clock, store = FakeClock(), Logged(trouble)
    writer = writer_of(store, clock)
    came: list[float] = []
    for look in range(120):
        is_lull = look % 60 >= 40
        came += [] if is_lull else [clock()]
        write(writer, *([] if is_lull else [ONE]))
        clock.sleep(LOOK_S)
        late = [at for at in came[store.plain :] if clock() - at > BEHIND_S]
        assert not late, f"{clock() - late[0]} s behind"
    assert len(store.kept) == store.plain == len(came)
    assert 1 < store.made <= 60 / PARQUET_INTERVAL_S + 1  # one in ten seconds, the first at once
    write(writer, ONE, times=0)
    writer.save()
    assert len(store.kept) == store.plain == len(came) + 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_batch_whose_sync_failed_and_that_stands_nevertheless_is_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is written again as it was: once there is room, or at the end if it was given up."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    jobs, clock = [job(size) for size in (1, 2, 3)], FakeClock()
    with Store(tmp_path, "night") as store:
        writer = writer_of(store, clock, *jobs)
        writer.patience.limit_s = 0.0
        store.append(row(3))  # begins the log
        with monkeypatch.context() as broken:
            broken.setattr(disk_calls, "sync", fail)
            if number == errno.ENOSPC:
                write(writer, *jobs[:2], times=4)
                assert writer.delayed is not None
            else:
                with pytest.raises(StoreError):
                    write(writer, *jobs[:2], times=4)
            write(writer, jobs[2], times=0)
        if writer.delayed is not None:
            clock.sleep(60)
            writer.look_for_room()
            assert writer.delayed is None and sizes(store) == [1, 2, 3, 4]
        for _ in range(2):
            writer.save()
            store.to_parquet()
            assert sizes(store) == [1, 2, 3, 4]


def test_rows_become_parquet_while_others_find_no_room() -> None:
    clock, store = FakeClock(), Logged()
    writer = writer_of(store, clock)
    for _ in range(2):  # the first has a file at once
        write(writer, ONE, times=6)
    store.full = True
    write(writer, ONE, times=0)
    for _ in range(30):
        writer.write()
        clock.sleep(LOOK_S)
    assert writer.delayed is not None and store.plain == 2


def test_rows_of_the_same_moment_are_written_together() -> None:
    store = Logged()
    batches: list[int] = []
    store.append = lambda *rows: batches.append(len(rows))  # type: ignore[method-assign]
    write(writer_of(store, FakeClock(), ONE, job(2)), ONE, job(2))
    assert batches == [2]


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
    caplog.set_level(logging.WARNING, logger="nightgrid.store")
    clock = FakeClock()
    writer = writer_of(Logged(*troubles), clock)
    for _ in range(len(troubles) + 1):
        write(writer, ONE)
        clock.sleep(PARQUET_INTERVAL_S)
    assert len(caplog.records) == messages


def test_agents_hear_of_rows_that_are_safe() -> None:
    clock, store = FakeClock(), Logged()
    writer = writer_of(store, clock)
    safe: list[str] = []
    writer.durable = safe.extend
    store.full = True
    tried = attempt(ONE, node().cards[0])
    outcome = Outcome(attempt_id=tried.attempt_id, state=State.LOST, ranks=())
    lost = RecordRow(
        job=ONE, state=State.LOST, reason="x", final=False, attempt=tried, outcome=outcome
    )
    writer.take(lost)
    write(writer, ONE, times=4)
    assert writer.delayed is not None and safe == []
    store.full = False
    clock.sleep(60)
    writer.look_for_room()
    assert safe == [tried.attempt_id] and writer.delayed is None


# ---------------------------------------------------------------- a real disk without room


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 2 * 2**20) as directory:
        yield directory


class Same:
    def estimate(self, _: object) -> Estimate:
        return Estimate(load_s=0.0, run_s=2.0)


class Night:
    """Some jobs on two cards, a real store, virtual time. Others fill the disk from second
    ``full_from`` until ``full_until``; a stop is requested at ``stop_at``."""

    def __init__(
        self,
        store: Store,
        full_from: float,
        *,
        full_until: float = float("inf"),
        stop_at: float = float("inf"),
        jobs: int = 6,
    ) -> None:
        self.store, self.clock, self.view = store, FakeClock(), Lines()
        self.started_while_full = 0
        self.statuses: list[RunStatus] = []
        whole = plan(*(job(size) for size in range(1, jobs + 1)))
        executor, stop = FakeExecutor(self.clock, node()), StopSignal()
        self.driver = driver_of(
            self.clock,
            store,
            *(planned.job for planned in whole.jobs),
            schedule=Schedule(whole.jobs, ScheduleSettings(), Same()),
            executor=executor,
            view=self.view,
            write_status=self._write_status,
            stop=stop,
        )
        perform, events = executor.perform, executor.events

        def counted(command: object) -> None:
            if self.driver.board.paused and isinstance(command, RunAttempt | StartWorker):
                self.started_while_full += 1
            perform(command)  # type: ignore[arg-type]

        def timed(timeout_s: float) -> list:
            now = self.clock() - MOMENT
            if now >= stop_at and not stop.requests:
                stop.request("SIGTERM received")
            if full_from <= now < full_until:
                fill(store.path.parent)
            elif now >= full_until:
                (store.path.parent / FILLER).unlink(missing_ok=True)
            return events(timeout_s)

        executor.perform = counted  # type: ignore[method-assign]
        executor.events = timed  # type: ignore[method-assign]
        assert self.driver.drive().finished
        self.lasted_s = self.clock() - MOMENT

    def _write_status(self, text: str) -> None:
        self.store.write_file("status.json", text)
        self.statuses.append(RunStatus.from_json((self.store.path / "status.json").read_text()))

    def succeeded(self) -> int:
        """Count the jobs that have their one final row, as readers see it."""
        rows = self.store.measurements()
        final = [each.job_id for each in rows if each.final]
        assert len(final) == len(set(final))
        return sum(each.state is State.SUCCEEDED for each in rows)


def test_a_run_pauses_on_a_full_disk_and_goes_on(disk: Path) -> None:
    with Store(disk, "night") as store:
        night = Night(store, full_from=6, full_until=120)
        assert night.succeeded() == 6
    assert night.lasted_s > 120 and night.started_while_full == 0
    assert sum("PAUSED: cannot write" in line for line in night.view.lines) == 1
    assert sum("there is room again after" in line for line in night.view.lines) == 1
    assert any("No space left" in status.paused for status in night.statuses)
    assert not night.statuses[-1].paused


@pytest.mark.parametrize(
    ("options", "printed", "shortest_s", "longest_s"),
    [
        ({"stop_at": 60}, 6, 60, 120),
        ({"jobs": 1}, 1, 120, 140),  # all is measured: it waits two minutes for room
    ],
    ids=["a stop", "the end"],
)
def test_rows_without_any_place_are_printed(
    disk: Path,
    capfd: pytest.CaptureFixture[str],
    options: Any,
    printed: int,
    shortest_s: float,
    longest_s: float,
) -> None:
    with Store(disk, "night") as store:
        night = Night(store, full_from=6, **options)
    assert shortest_s <= night.lasted_s < longest_s
    assert capfd.readouterr().err.count("row without a place: Measurement(") == printed
    assert "are printed above" in night.view.lines[-1]


def test_an_attempt_whose_note_finds_no_room_waits_for_it(disk: Path) -> None:
    """Started without a note, its driver killed, its number would be given away once more."""
    with Store(disk, "night") as store:
        night = Night(store, full_from=0, full_until=60, jobs=1)
        assert night.succeeded() == 1
    assert night.lasted_s > 60 and night.started_while_full == 0


@pytest.mark.parametrize("name", ["driver.lock", ".driver.lock.guard"])
def test_a_lock_that_finds_no_room_leaves_nothing_and_names_its_path(disk: Path, name: str) -> None:
    """Not a lock that nobody holds, nor the file that was to become one."""
    store = Store(disk, "night")
    store.tables_path.mkdir(parents=True)
    guard = ".driver.lock.guard"
    if name != guard:
        (store.path / guard).touch()
    fill(disk)
    before = {*os.listdir(store.path)} - {guard}
    with pytest.raises(StoreError, match=r"driver\.lock.*No space left"), store:
        pass
    assert {*os.listdir(store.path)} - {guard} == before
    os.unlink(disk / FILLER)
    with store:
        store.append(row())
