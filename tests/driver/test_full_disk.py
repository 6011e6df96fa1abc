"""A full disk: nothing new starts, what runs goes on, no row is lost, and the run says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from driver_cases import MOMENT, FakeClock, FakeExecutor, Later, attempt, job, node, plan
from measurements import row
from small_disks import FILLER, fill, small_disk
from test_driver_loop import Lines, Rows

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.errors import StoreError, StoreFull
from orchestrator.core.events import RecordRow, RunAttempt, StartWorker
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.status import RunStatus
from orchestrator.driver.board import Board
from orchestrator.driver.loop import Driver
from orchestrator.driver.rows import RowWriter
from orchestrator.driver.stop_signal import Patience, StopSignal
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.store.store import Store

ROOM = 2 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    with small_disk(tmp_path / "disk", ROOM) as directory:
        yield directory


class Same:
    """Every job is estimated to take two seconds."""

    def estimate(self, _: object) -> Estimate:
        """Two seconds."""
        return Estimate(load_s=0.0, run_s=2.0)


#: Rows are written in the loop, or beside it, which is seen at the third look.
in_or_beside_the_loop = pytest.mark.parametrize("looks", [None, 2])


class Night:
    """Some jobs on two cards, a real store, virtual time. Others fill the disk from second
    ``full_from`` until ``full_until``; ``at`` says what else happens when."""

    def __init__(
        self,
        store: Store,
        *,
        looks: int | None,
        full_from: float,
        full_until: float = float("inf"),
        at: dict[float, Callable[[], object]] | None = None,
        jobs: int = 6,
    ) -> None:
        self.jobs = [job(size) for size in range(1, jobs + 1)]
        self.store = store
        self.clock = FakeClock()
        self.executor = FakeExecutor(self.clock, node())
        self.view = Lines()
        self.stop = StopSignal()
        self.started_while_full = 0
        self.statuses: list[RunStatus] = []
        self._at = sorted((at or {}).items(), key=lambda item: item[0])
        whole = plan(*self.jobs)
        board = Board(run="night", plan=whole, started_at=MOMENT)
        self.driver = Driver(
            schedule=Schedule(whole.jobs, ScheduleSettings(), Same()),
            executor=self.executor,
            store=store,
            to_measurement=lambda record: measurement_of(
                record, run="night", invocation_id="i", recorded_at=self.clock()
            ),
            board=board,
            view=self.view,
            write_status=self._write_status,
            stop=self.stop,
            clock=self.clock,
            wall=self.clock,
            sleep=self.clock.sleep,
            row_thread=None if looks is None else Later(looks),
        )
        perform = self.executor.perform

        def counted(command: object) -> None:
            if board.paused and isinstance(command, RunAttempt | StartWorker):
                self.started_while_full += 1
            perform(command)  # type: ignore[arg-type]

        events = self.executor.events

        def timed(timeout_s: float) -> list:
            now = self.clock() - MOMENT
            while self._at and now >= self._at[0][0]:
                self._at.pop(0)[1]()
            disk = store.path.parent
            if full_from <= now < full_until:
                fill(disk)
            elif now >= full_until:
                (disk / FILLER).unlink(missing_ok=True)
            return events(timeout_s)

        self.executor.perform = counted  # type: ignore[method-assign]
        self.executor.events = timed  # type: ignore[method-assign]

    def _write_status(self, text: str) -> None:
        self.store.write_file("status.json", text)
        self.statuses.append(
            RunStatus.from_json((self.store.path / "status.json").read_text(encoding="utf-8"))
        )

    def succeeded(self) -> int:
        """Count the jobs that have their one final row, as readers see it."""
        rows = self.store.measurements()
        final = [each.job_id for each in rows if each.final]
        assert len(final) == len(set(final))
        return sum(each.state is State.SUCCEEDED for each in rows)


@in_or_beside_the_loop
def test_a_run_pauses_on_a_full_disk_and_goes_on(disk: Path, looks: int | None) -> None:
    """A real file system fills up while attempts run and has room again two minutes later: every
    job has its row, nothing was started meanwhile, and line, status and file told why."""
    with Store.open(disk, "night") as store:
        night = Night(store, looks=looks, full_from=6, full_until=120)
        assert night.driver.drive().finished
        assert night.succeeded() == 6
        assert night.clock() - MOMENT > 120
        assert night.started_while_full == 0
        assert sum("PAUSED: cannot write" in line for line in night.view.lines) == 1
        assert sum("there is room again after" in line for line in night.view.lines) == 1
        assert any("No space left" in status.paused for status in night.statuses)
        assert not night.statuses[-1].paused


@in_or_beside_the_loop
def test_rows_without_any_place_are_printed(
    disk: Path, capfd: pytest.CaptureFixture[str], looks: int | None
) -> None:
    """Standard error has them, and the next driver measures their jobs again."""
    with Store.open(disk, "night") as store:
        night = Night(
            store, looks=looks, full_from=6, at={60: lambda: night.stop.request("SIGTERM received")}
        )
        assert night.driver.drive().finished
    printed = capfd.readouterr().err
    assert printed.count("row without a place: Measurement(") == 6
    assert "are printed above" in night.view.lines[-1]


@in_or_beside_the_loop
def test_all_is_measured_and_the_disk_stays_full(disk: Path, looks: int | None) -> None:
    """After two minutes of waiting for room for the last row, the run ends and prints it."""
    with Store.open(disk, "night") as store:
        night = Night(store, looks=looks, full_from=6, jobs=1)
        assert night.driver.drive().finished
        assert 120 <= night.clock() - MOMENT < 140


@in_or_beside_the_loop
def test_an_attempt_whose_note_finds_no_room_waits_for_it(disk: Path, looks: int | None) -> None:
    """Started without a note, its driver killed, its number would be given away once more."""
    with Store.open(disk, "night") as store:
        night = Night(store, looks=looks, full_from=0, full_until=60, jobs=1)
        assert night.driver.drive().finished
        assert night.clock() - MOMENT > 60
        assert night.succeeded() == 1 and night.started_while_full == 0


def test_a_reserve_keeps_room_for_the_status(disk: Path) -> None:
    """On a disk without a free byte, the side files can still be replaced."""
    with Store.open(disk, "night") as store:
        fill(disk)
        with pytest.raises(StoreFull):
            store.append(row())
        store.write_file("status.json", "{}")
        assert (store.path / "status.json").read_text() == "{}"
        with pytest.raises(StoreFull):
            fill(disk)
            store.make_reserve()
        os.unlink(disk / FILLER)
        store.make_reserve()
        store.append(row())


@pytest.mark.parametrize("name", ["driver.lock", ".driver.lock.guard"])
def test_a_lock_that_finds_no_room_leaves_nothing_and_names_its_path(disk: Path, name: str) -> None:
    """Not a lock that nobody holds, nor the file that was to become one."""
    store = Store.open(disk, "night")
    store.tables_path.mkdir(parents=True)
    if name == "driver.lock":
        (store.path / ".driver.lock.guard").touch()
    fill(disk)
    before = sorted(os.listdir(store.path))
    with pytest.raises(StoreError, match=r"driver\.lock.*No space left"), store:
        pass
    assert [n for n in sorted(os.listdir(store.path)) if n != ".driver.lock.guard"] == [
        n for n in before if n != ".driver.lock.guard"
    ]
    os.unlink(disk / FILLER)
    with store:
        store.append(row())


def test_jobs_that_do_not_run_are_told_although_the_disk_got_full_meanwhile() -> None:
    """Their rows are being written when a note finds no room."""
    clock, view = FakeClock(), Lines()
    one, other = job(1), job(2)

    class FullForNotes(Rows):
        def begin(self, *rows: Measurement) -> None:
            raise StoreFull("no space left")

    writer = RowWriter(
        store=FullForNotes(),
        to_measurement=lambda record: measurement_of(
            record, run="night", invocation_id="i", recorded_at=clock()
        ),
        board=Board(run="night", plan=plan(one, other), started_at=MOMENT),
        view=view,
        patience=Patience(view=view, stop=StopSignal(), clock=clock, sleep=clock.sleep),
        clock=clock,
        wall=clock,
        thread=Later(9),
    )
    writer.take(RecordRow(job=one, state=State.NOT_STARTED, reason="no time is left", final=True))
    writer.write_soon()
    writer.begin([RunAttempt(attempt=attempt(other, node().cards[0]), worker_ids=("w",))])
    assert writer.writing and writer.delayed is not None
    writer.look_for_room()
    assert not writer.writing and any("no time is left" in line for line in view.lines)
