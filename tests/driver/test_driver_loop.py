"""The loop keeps its promises: order, durability, timers, signals, endurance."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from driver_cases import MOMENT, FakeClock, FakeExecutor, attempt, job, node, plan

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.errors import (
    ClusterError,
    ControlStoreLost,
    StoreError,
    StoreFull,
    StoreLocked,
)
from orchestrator.core.events import (
    AttemptEnded,
    ClockSet,
    Command,
    Event,
    NodeJoined,
    RecordRow,
    RunAttempt,
    RunFinished,
    StartWorker,
    StopRequested,
    StopWorker,
    Tick,
    Wake,
    WorkerOverdue,
    WorkerQueued,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Attempt
from orchestrator.core.status import RunStatus
from orchestrator.driver.board import Board
from orchestrator.driver.loop import Driver
from orchestrator.driver.supervisor import StopSignal
from orchestrator.watch.live import summary_line


class Script:
    def __init__(self, answer: Callable[[Event], list[Command]]) -> None:
        self._answer = answer
        self.events: list[Event] = []

    def handle(self, event: Event) -> list[Command]:
        self.events.append(event)
        return self._answer(event)


class Rows:
    """A row store that can fail a number of times first; ``lost`` to another driver, always."""

    lost = False

    def __init__(self, failures: int = 0) -> None:
        self.kept: list[Measurement] = []
        self._failures = failures
        self.files: dict[str, bytes] = {}

    def write_file(self, name: str, content: bytes) -> None:
        if self.files:
            raise StoreFull("no space left")
        self.files[name] = content

    def begin(self, *rows: Measurement) -> None:
        if self.lost:
            raise StoreLocked("taken over")

    def append(self, *measurements: Measurement) -> None:
        if self.lost:
            raise StoreLocked("taken over")
        if self._failures:
            self._failures -= 1
            raise OSError("input/output error")
        self.kept += measurements

    def to_parquet(self) -> None:
        """Rows are plain for everybody."""

    def make_reserve(self) -> None:
        """There is room for more where there was for a row."""


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shown: list[RunStatus] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def show(self, status: RunStatus) -> None:
        self.shown.append(status)

    def close(self) -> None:
        """Nothing."""


ONE, TWO = job(1), job(2)
CARD = node().cards[0]


def row_of(event: AttemptEnded, of: Attempt) -> RecordRow:
    return RecordRow(
        job=of.job,
        state=event.outcome.state,
        reason="",
        final=True,
        attempt=of,
        outcome=event.outcome,
    )


def one_job_after_another(event: Event) -> list[Command]:
    if isinstance(event, NodeJoined):
        return [StartWorker(worker_id="w1", card=CARD)]
    if isinstance(event, WorkerReady):
        return [RunAttempt(attempt=attempt(ONE, CARD), worker_ids=("w1",))]
    if isinstance(event, AttemptEnded):
        this = ONE if event.outcome.attempt_id.startswith(ONE.job_id) else TWO
        row = row_of(event, attempt(this, CARD))
        if this is ONE:
            return [row, RunAttempt(attempt=attempt(TWO, CARD), worker_ids=("w1",))]
        return [row, StopWorker(worker_id="w1", reason="done")]
    if isinstance(event, WorkerStopped):
        return [RunFinished(reason="every job is terminal")]
    return []


def driver_of(clock: FakeClock, store: Any, *jobs: Job, **parts: Any) -> Driver:
    """A driver in virtual time."""
    return Driver(
        store=store,
        to_measurement=lambda row: measurement_of(
            row, run="night", invocation_id="i", recorded_at=clock()
        ),
        board=Board(run="night", plan=plan(*jobs), started_at=MOMENT, limits_s={"measure": 30.0}),
        clock=clock,
        wall=clock,
        sleep=clock.sleep,
        **parts,
    )


class Case:
    """A driver with everything around it in memory and in virtual time; ``parts`` are its own."""

    def __init__(
        self,
        answer: Callable[[Event], list[Command]] = one_job_after_another,
        *,
        rows: Any = None,
        faults: Callable[[str], None] = lambda _: None,
        **parts: Any,
    ) -> None:
        self.clock, self.stop, self.view = FakeClock(), StopSignal(), Lines()
        self.script = Script(answer)
        self.executor = FakeExecutor(self.clock, node(), faults=faults)
        self.rows = rows or Rows()
        self.driver = driver_of(
            self.clock,
            self.rows,
            *(ONE, TWO),
            schedule=self.script,
            executor=self.executor,
            view=self.view,
            stop=self.stop,
            **parts,
        )


def test_a_run_goes_from_the_first_event_to_run_finished() -> None:
    case = Case()
    result = case.driver.drive()
    assert (result.finished, result.reason) == (True, "every job is terminal")
    assert [row.job_id for row in case.rows.kept] == [ONE.job_id, TWO.job_id]
    assert all(row.metrics.generated_tokens_per_s == pytest.approx(10) for row in case.rows.kept)
    assert [type(event) for event in case.script.events[:2]] == [ClockSet, Tick]
    assert case.view.shown[-1].finished and case.view.shown[-1].done == 2


def test_the_trace_of_a_profile_lies_beside_the_rows() -> None:
    def profiled(event: Event) -> list[Command]:
        if not isinstance(event, AttemptEnded):
            return one_job_after_another(event)
        (rank,) = event.outcome.ranks
        assert rank.result is not None
        seen = replace(rank, result=replace(rank.result, trace=b"gz"))
        return one_job_after_another(replace(event, outcome=replace(event.outcome, ranks=(seen,))))

    case = Case(profiled)
    case.driver.drive()
    assert case.rows.files == {f"trace-{ONE.job_id}-1.json.gz": b"gz"}
    assert len(case.rows.kept) == 2
    assert any(f"trace-{TWO.job_id}-1.json.gz is not kept" in line for line in case.view.lines)


def test_no_card_waits_for_the_disk_and_the_driver_never_waits_without_its_rows() -> None:
    """The second job starts before the first one's row is written."""
    case = Case()
    begun_by_write: list[int] = []
    ended = 0
    keep, events, show = case.rows.append, case.executor.events, case.view.show

    def append(*measurements: Measurement) -> None:
        begun_by_write.append(sum(isinstance(each, RunAttempt) for each in case.executor.log))
        keep(*measurements)

    def waiting(timeout_s: float) -> list[Event]:
        nonlocal ended
        assert timeout_s == 0 or len(case.rows.kept) == ended
        happened = events(timeout_s)
        ended += sum(isinstance(event, AttemptEnded) for event in happened)
        return happened

    def shown(status: RunStatus) -> None:
        assert status.done == status.attempts == ended
        show(status)

    case.rows.append = append
    case.executor.events = waiting  # type: ignore[method-assign]
    case.view.show = shown  # type: ignore[method-assign]
    assert case.driver.drive().finished
    assert begun_by_write == [2, 2] and ended == 2


def test_the_third_request_ends_a_run_at_once_with_the_rows_that_it_has() -> None:
    def answer(event: Event) -> list[Command]:
        if isinstance(event, AttemptEnded):
            for _ in range(3):
                case.stop.request("SIGINT received")
        return one_job_after_another(event)

    case = Case(answer)
    result = case.driver.drive()
    assert not result.finished and result.reason == "SIGINT received"
    assert [row.job_id for row in case.rows.kept] == [ONE.job_id]


def test_every_request_to_stop_is_passed_on_to_the_schedule() -> None:
    def answer(event: Event) -> list[Command]:
        if isinstance(event, (WorkerReady, StopRequested)):
            case.stop.request("SIGINT received")
        return [] if isinstance(event, AttemptEnded) else one_job_after_another(event)

    case = Case(answer)
    assert not case.driver.drive().finished
    assert sum(isinstance(event, StopRequested) for event in case.script.events) >= 2


def test_a_disk_that_stays_broken_ends_the_run_with_its_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = Case(rows=Rows(failures=10_000))
    with pytest.raises(StoreError, match="the store keeps failing: input/output error"):
        case.driver.drive()
    assert 120 <= case.clock() - MOMENT < 180
    assert capfd.readouterr().err.count("row without a place: Measurement(") == 1
    assert (
        "rows that are not written, the store keeps failing: input/output error: 1; they"
        in case.view.lines[-1]
    )


def test_a_driver_that_lost_the_run_starts_nothing_and_leaves_no_row(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It was frozen, and another driver took the run while the first job was measured."""

    def answer(event: Event) -> list[Command]:
        case.rows.lost = isinstance(event, AttemptEnded)
        return one_job_after_another(event)

    case = Case(answer)
    with pytest.raises(StoreLocked):
        case.driver.drive()
    begun = [each.attempt.job for each in case.executor.log if isinstance(each, RunAttempt)]
    assert begun == [ONE] and not case.rows.kept
    assert capfd.readouterr().err.count("row without a place: Measurement(") == 1
    assert "rows that are not written, taken over: 1; they are printed" in case.view.lines[-1]


@pytest.mark.parametrize("times", [3, 10_000])
def test_an_executor_that_fails_is_waited_for_as_long_as_patience_lasts(times: int) -> None:
    stumbles = iter([True] * times + [False] * 10_000)

    def faults(method: str) -> None:
        if method == "events" and next(stumbles):
            raise ConnectionError("the control store does not answer")

    case = Case(faults=faults)
    if times > 3:
        with pytest.raises(ClusterError, match="keeps failing: the control store"):
            case.driver.drive()
        return
    assert case.driver.drive().finished and len(case.rows.kept) == 2
    assert sum("does not answer" in line for line in case.view.lines) == 3


def test_a_lost_control_store_ends_the_run_at_once() -> None:
    case = Case()
    events = case.executor.events

    def gone_after_a_row(timeout_s: float) -> list[Event]:
        if case.rows.kept:
            raise ControlStoreLost("it has not answered since 03:00:00")
        return events(timeout_s)

    case.executor.events = gone_after_a_row  # type: ignore[method-assign]
    with pytest.raises(ControlStoreLost, match="03:00:00"):
        case.driver.drive()
    assert case.clock.now - MOMENT < 20 and len(case.rows.kept) == 1


def test_trouble_with_the_cluster_is_told_when_it_begins_and_when_it_ends() -> None:
    case = Case()
    texts = iter(["", "silent for 5 s", "silent for 6 s", "silent for 7 s", *[""] * 20])
    case.driver.trouble = lambda: next(texts)
    assert case.driver.drive().finished
    told = [line for line in case.view.lines if "silent" in line]
    assert told == [
        "TROUBLE: silent for 5 s; what runs goes on",
        "no more: silent for 7 s",
    ]
    shown = [status.trouble for status in case.view.shown]
    assert "silent for 6 s" in shown and shown[-1] == ""


def test_whom_a_run_waits_for_is_said_at_once_on_change_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestrator.driver.loop.WAITING_INTERVAL_S", 2.0)
    case = Case()
    texts = iter(["a has the cards", *["b has the cards"] * 4])
    case.driver.waiting = lambda: next(texts, "")
    assert case.driver.drive().finished
    told = [line for line in case.view.lines if "WAITING" in line]
    assert told[:2] == ["WAITING: a has the cards", "WAITING: b has the cards"]
    assert 3 <= len(told) < 5 and set(told[2:]) == {told[1]}
    said = [summary_line(RunStatus.from_json(each.to_json())) for each in case.view.shown]
    assert "WAITING: b has the cards" in said[2] and "WAITING" not in said[-1]


def test_ticks_come_when_they_were_asked_for() -> None:
    ticks: list[float] = []

    def answer(event: Event) -> list[Command]:
        if isinstance(event, NodeJoined):
            return [Wake(at=MOMENT + 30), Wake(at=MOMENT + 3.2), Wake(at=MOMENT + 3.3)]
        if isinstance(event, Tick) and event.at > MOMENT:
            ticks.append(event.at - MOMENT)
            if event.at >= MOMENT + 30:
                return [RunFinished(reason="late enough")]
        return []

    Case(answer).driver.drive()
    assert ticks == pytest.approx([3.2, 3.3, 30.0])


def test_the_first_signal_asks_for_an_orderly_end() -> None:
    def answer(event: Event) -> list[Command]:
        if isinstance(event, StopRequested):
            return [RunFinished(reason=f"stopped: {event.reason}")]
        if isinstance(event, WorkerReady):
            os.kill(os.getpid(), signal.SIGTERM)
        return one_job_after_another(event)

    case = Case(answer)
    before = signal.getsignal(signal.SIGTERM)
    with case.stop.on_signals():
        result = case.driver.drive()
    assert result.finished and result.reason == "stopped: SIGTERM received"
    assert signal.getsignal(signal.SIGTERM) is before
    (told,) = [line for line in case.view.lines if line.startswith("stopping: SIGTERM received; ")]
    assert "A second one stops them" in told and "same command resumes the run" in told


def test_the_signals_that_ray_and_a_supervisor_send_together_are_one_request() -> None:
    with StopSignal(merge_s=60.0).on_signals() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requests == 1


def test_a_hung_worker_is_stopped_and_the_schedule_hears_of_it() -> None:
    def answer(event: Event) -> list[Command]:
        if isinstance(event, AttemptEnded):
            return []
        if isinstance(event, WorkerOverdue):
            return [StopWorker(worker_id=event.worker_id, reason=event.reason)]
        return one_job_after_another(event)

    case = Case(answer)
    case.executor.attempt_s = 1e9
    assert case.driver.drive().finished
    ended, stopped = case.script.events[-2:]
    assert isinstance(ended, AttemptEnded) and ended.outcome.state is State.LOST
    assert isinstance(stopped, WorkerStopped)
    limit_s = 30 + ONE.measure.warmup_limit_s + 3 * ONE.measure.time_limit_s
    assert limit_s < case.clock() - MOMENT < limit_s + 10
    assert any("hung in measure" in line for line in case.view.lines)


def test_the_schedule_hears_of_what_is_queued_when_the_run_stops() -> None:
    def answer(event: Event) -> list[Command]:
        if isinstance(event, WorkerReady):
            case.stop.request("SIGTERM received")
        if isinstance(event, WorkerQueued):
            assert case.stop.requests
            return [StopWorker(worker_id=event.worker_id, reason="SIGTERM received")]
        return one_job_after_another(event) if not isinstance(event, AttemptEnded) else []

    case = Case(answer)
    case.executor.attempt_s, case.executor.phase = 1e9, "queued"
    assert case.driver.drive().finished
    assert case.clock() - MOMENT < 10


def test_the_status_follows_the_run_once_a_second_at_most() -> None:
    texts: list[str] = []
    Case(write_status=texts.append).driver.drive()
    *shown, last = map(RunStatus.from_json, texts)
    assert {"free", "starting", "measure"} <= {card.phase for one in shown for card in one.cards}
    assert len(shown) > 3 and last.finished
    assert all(later.at - sooner.at >= 1.0 for sooner, later in itertools.pairwise(shown))


@pytest.mark.parametrize("error", [OSError("read-only"), StoreError("disk full")])
def test_a_status_that_cannot_be_written_or_published_harms_nothing(error: Exception) -> None:
    published: list[RunStatus] = []

    def publish(status: RunStatus) -> None:
        published.append(status)
        raise OSError("the monitor is gone")

    def write(_: str) -> None:
        raise error

    case = Case(write_status=write, publish=publish)
    assert case.driver.drive().finished
    assert published == case.view.shown and published[-1].finished
    assert published[-1].cards[0].power_w == 412.5 and published[-1].cards[1].power_w is None
