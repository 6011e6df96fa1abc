"""The board knows from events and commands alone what runs where, and what hangs."""

import dataclasses
import json
import math
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from driver_cases import MOMENT, attempt, job, node, plan
from hypothesis import given
from hypothesis import strategies as st
from measurements import row
from schedule_cases import Fixed, busy_cluster, planned

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import (
    AttemptEnded,
    ClockSet,
    Command,
    NodeJoined,
    NodeLeft,
    Progress,
    RecordRow,
    RunAttempt,
    RunFinished,
    StartWorker,
    StopRequested,
    Tick,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import State
from orchestrator.core.measurement import Metrics
from orchestrator.core.outcome import Attempt, Outcome
from orchestrator.core.plan import Action, Span
from orchestrator.core.status import Rate, RunStatus
from orchestrator.driver.board import KEPT_FAILURES, LONGEST_PAUSE_S, PHASE_LIMITS_S, Board
from orchestrator.driver.standing import Standing
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.scheduler.simulated_faults import WORKER_INFO
from orchestrator.util.host import CallAt, Interval
from orchestrator.watch.live import event_line

SERVER = node()
FIRST = attempt(job(1), SERVER.cards[0])


def board_with_a_running_job(jobs: int = 4) -> Board:
    board = Board(
        run="night",
        plan=plan(*(job(batch) for batch in range(1, jobs + 1))),
        started_at=MOMENT,
    )
    board.saw(NodeJoined(at=MOMENT, node=SERVER))
    board.did(StartWorker(worker_id="w1", card=SERVER.cards[0]), MOMENT)
    board.did(RunAttempt(attempt=FIRST, worker_ids=("w1",)), MOMENT + 5)
    return board


def record(
    board: Board, state: State, *, final: bool = True, reason: str = "", **changes: Any
) -> None:
    row = RecordRow(job=job(1), state=state, reason=reason, final=final, attempt=FIRST)
    measurement = measurement_of(row, run="night", invocation_id="i", recorded_at=MOMENT)
    board.did(row, MOMENT)
    board.measured(row, dataclasses.replace(measurement, **changes), MOMENT)


def test_a_card_shows_the_phase_its_worker_reports() -> None:
    board = board_with_a_running_job()
    heard = Progress(worker_id="w1", attempt_id=FIRST.attempt_id, phase="warmup")
    stale = dataclasses.replace(heard, attempt_id="another-1", phase="measure")
    assert board.status(MOMENT + 6, {"w1": stale}).cards[0].phase == "start"

    board.status(MOMENT + 8, {"w1": heard})
    (busy, free) = board.status(MOMENT + 10, {"w1": heard}).cards
    assert (busy.card, busy.phase, busy.phase_age_s) == ("hpu-1/HPU0", "warmup", 2.0)
    assert busy.job == "b=1"
    assert (free.card, free.phase, free.job) == ("hpu-1/HPU1", "free", "")


def test_an_ended_attempt_leaves_its_worker_idle_and_a_stopped_worker_its_card_free() -> None:
    board = board_with_a_running_job()
    outcome = Outcome(attempt_id=FIRST.attempt_id, state=State.SUCCEEDED, ranks=())
    board.saw(AttemptEnded(at=MOMENT + 9, outcome=outcome))
    assert board.status(MOMENT + 9, {}).cards[0].phase == "idle"
    assert board.status(MOMENT + 9, {}).running == 0
    board.saw(WorkerStopped(at=MOMENT + 10, worker_id="w1"))
    assert board.status(MOMENT + 10, {}).cards[0].phase == "free"
    assert board.status(MOMENT + 10, {}).cards[0].worker_id == ""


def test_reused_and_skipped_jobs_are_done_from_the_start() -> None:
    whole = plan(job(1), job(2), job(3))
    actions = zip(whole.jobs, (Action.REUSE, Action.SKIP, Action.RUN), strict=True)
    jobs = tuple(dataclasses.replace(planned, action=action) for planned, action in actions)
    mixed = dataclasses.replace(whole, jobs=jobs)
    status = Board(run="night", plan=mixed, started_at=MOMENT).status(MOMENT, {})
    assert (status.done, status.counts) == (2, {"reused": 1, "skipped": 1})


def test_the_time_left_is_the_planned_range_until_a_job_has_ended() -> None:
    """At first the plan less what is over, past its end nothing; then what the jobs that ended say
    of the others (the first attempt began at 5 s), as a range until a fifth is done."""
    board = board_with_a_running_job(jobs=16)
    planned = Span(low_s=20.0, middle_s=60.0, high_s=200.0)
    board.plan = dataclasses.replace(board.plan, duration=planned)
    begun = board.status(MOMENT + 6, {})
    assert (begun.eta_low_s, begun.eta_s, begun.eta_high_s) == (14.0, 54.0, 194.0)
    assert (begun.first_attempt_s, begun.promised_low_s, begun.promised_high_s) == (5.0, 20, 200)
    assert board.status(MOMENT + 201, {}).eta_s is None

    def done(batch: int, at: float) -> RunStatus:
        tried = attempt(job(batch), SERVER.cards[0])
        if batch > 1:
            board.did(RunAttempt(attempt=tried, worker_ids=("w1",)), MOMENT + at - 10)
        outcome = Outcome(attempt_id=tried.attempt_id, state=State.SUCCEEDED, ranks=())
        board.saw(AttemptEnded(at=MOMENT + at, outcome=outcome))
        row = RecordRow(job=job(batch), state=State.SUCCEEDED, reason="", final=True, attempt=tried)
        measured = measurement_of(row, run="night", invocation_id="i", recorded_at=MOMENT)
        board.did(row, MOMENT + at)
        board.measured(row, dataclasses.replace(measured, jobs_before=1), MOMENT + at)
        return board.status(MOMENT + at, {})

    first = done(1, 15)
    assert first.eta_s == pytest.approx(150.0, rel=0.5)
    assert (first.eta_low_s, first.eta_high_s) == (first.eta_s / 2, first.eta_s * 2)
    fourth = [done(batch, 5 + 10 * batch) for batch in (2, 3, 4)][-1]
    assert (fourth.eta_low_s, fourth.eta_s) == (None, pytest.approx(120.0, rel=0.3))


def test_a_start_that_waited_for_others_tells_nothing_of_starts() -> None:
    board = Board(run="night", plan=plan(job(1)), started_at=MOMENT)
    board.waiting = "run other has all cards"
    board.status(MOMENT, {})
    board.waiting = ""
    board.did(RunAttempt(attempt=FIRST, worker_ids=("w1",)), MOMENT + 5)
    assert board.status(MOMENT + 6, {}).first_attempt_s is None


def test_rates_are_the_work_of_finished_jobs_over_their_timed_seconds() -> None:
    board = board_with_a_running_job()
    figures = [
        (State.SUCCEEDED, True, 100.0, "tokens/s", 10.0),
        (State.SUCCEEDED, True, 200.0, "tokens/s", 30.0),
        (State.SUCCEEDED, True, 4.0, "samples/s", 5.0),
        (State.FAILED, True, 9999.0, "tokens/s", 5.0),
        (State.SUCCEEDED, False, 9999.0, "tokens/s", 5.0),
        (State.NOT_STARTED, True, 9999.0, "tokens/s", 5.0),
    ]
    for state, final, throughput, unit, seconds in figures:
        metrics = Metrics(throughput=throughput, throughput_unit=unit, measure_s=seconds)
        record(board, state, final=final, metrics=metrics)
    status = board.status(MOMENT + 7200, {})
    assert status.rates == (
        Rate(unit="tokens/s", per_s=pytest.approx(175.0), jobs=2),
        Rate(unit="samples/s", per_s=pytest.approx(4.0), jobs=1),
    )
    assert (status.jobs_run, status.done) == (4, 5)  # only final rows count
    assert status.jobs_per_h == pytest.approx(2.0)


def test_failed_attempts_are_counted_by_class_and_the_last_are_kept() -> None:
    board = board_with_a_running_job()
    for number in range(KEPT_FAILURES + 2):
        record(board, State.FAILED, final=False, failure_class="crash", reason=f"crash {number}")
    record(board, State.OUT_OF_MEMORY, failure_class="out_of_memory")
    record(board, State.LOST, failure_class="node_lost", reason="no\nheartbeat")
    status = board.status(MOMENT + 10, {})
    assert status.failure_counts == {"crash": KEPT_FAILURES + 2, "out_of_memory": 1, "node_lost": 1}
    assert len(status.failures) == KEPT_FAILURES
    newest, before = status.failures[:2]
    assert (newest.state, newest.failure_class) == ("LOST", "node_lost")
    assert (newest.reason, newest.final) == ("no heartbeat", True)
    assert (newest.job, newest.card) == ("b=1", "hpu-1/HPU0")
    assert (before.reason, before.final) == (f"crash {KEPT_FAILURES + 1}", False)


def test_a_status_of_a_neighbouring_version_is_read_as_far_as_it_is_known() -> None:
    values = json.loads(board_with_a_running_job().status(MOMENT, {}).to_json())
    values["added_later"] = values["cards"][0]["added_later"] = 1
    for name in ("rates", "failures", "failure_counts", "jobs_run"):
        del values[name]
    status = RunStatus.from_json(json.dumps(values))
    assert (status.total, len(status.cards), status.rates) == (4, 2, ())


def test_the_best_row_of_a_piece_of_work_is_one_that_stands() -> None:
    """Of two rows at least; one that is replaced by a row that never counts goes."""
    board = board_with_a_running_job()
    board.standing = Standing(make=lambda record: row(0))
    board.standing.load([row(0), row(1)])
    (best,) = board.status(MOMENT, {}).best
    assert (best.per_s, best.rows, best.provisional) == (pytest.approx(101.0), 2, "")
    board.standing.load([row(1, oversubscribed=True)])
    assert board.status(MOMENT, {}).best == ()


def test_a_lost_node_takes_its_cards_along() -> None:
    board = board_with_a_running_job()
    board.saw(NodeLeft(at=MOMENT + 6, node_id=SERVER.node_id, reason="gone"))
    board.saw(WorkerStopped(at=MOMENT + 7, worker_id="w1"))
    assert board.status(MOMENT + 8, {}).cards == ()
    assert board.node_name(SERVER.node_id) == "hpu-1"  # rows still name it


def test_status_survives_the_file() -> None:
    board = board_with_a_running_job()
    board.saw(StopRequested(at=MOMENT, reason="SIGTERM received"))
    board.did(RunFinished(reason="stopped"), MOMENT)
    record(board, State.FAILED, failure_class="crash")
    record(board, State.SUCCEEDED, metrics=Metrics(throughput=1.0, measure_s=2.0))
    status = board.status(MOMENT + 1, {})
    assert status.failures and status.rates and status.stopping
    assert status.finished and status.emulated
    assert RunStatus.from_json(status.to_json()) == status


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1, "cards": []}'])
def test_what_is_no_status_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        RunStatus.from_json(text)


# ---------------------------------------------------------------- hung workers


def looks(
    board: Board,
    *times: float,
    since: float | None = None,
    phase: str = "load",
    running: Attempt = FIRST,
) -> list[str]:
    """The reasons that came of looking at a worker in its phase until these times, every few
    seconds."""
    reasons, last = [], times[0] if since is None else since
    heard = {"w1": Progress(worker_id="w1", attempt_id=running.attempt_id, phase=phase)}
    for at in times:
        between = range(math.ceil(last) + 4, math.ceil(at), 4)
        for look in (*between, at):
            board.status(MOMENT + look, heard)
            reasons += [stop.reason for stop in board.overdue(MOMENT + look)]
        last = at
    return reasons


def busy(limits_s: Mapping[str, float] = PHASE_LIMITS_S, running: Attempt = FIRST) -> Board:
    board = Board(run="night", plan=plan(running.job), started_at=MOMENT, limits_s=limits_s)
    board.did(StartWorker(worker_id="w1", card=SERVER.cards[0]), MOMENT)
    board.did(RunAttempt(attempt=running, worker_ids=("w1",)), MOMENT)
    return board


@given(pause=st.floats(LONGEST_PAUSE_S, 1e6), before=st.integers(0, 60), limit=st.floats(20, 600))
def test_a_driver_that_was_halted_does_not_take_its_own_absence_for_a_hang(
    pause: float, before: int, limit: float
) -> None:
    board = busy({"load": limit})
    seen = min(before, limit - LONGEST_PAUSE_S - 1)
    assert looks(board, 0, seen) == []
    assert board.overdue(MOMENT + seen + pause) == []
    assert looks(board, seen + pause + limit + 1, since=seen + pause) != []


@pytest.mark.parametrize("phase", sorted({*PHASE_LIMITS_S} - {"starting"}))
def test_every_phase_has_a_limit(phase: str) -> None:
    measure = dataclasses.replace(job(1).measure, warmup=0, time_limit_s=1e-9)
    running = attempt(dataclasses.replace(job(1), measure=measure), SERVER.cards[0])
    board, limit = busy(running=running), PHASE_LIMITS_S[phase]
    assert looks(board, 0, limit - 1, phase=phase) == []
    (reason,) = looks(board, limit + 1, limit + 2, since=limit - 1, phase=phase)
    assert f"hung in {phase}" in reason and f"the limit is {limit:.0f} s" in reason


def test_a_worker_that_does_not_come_up_is_overdue_and_one_that_waits_is_not() -> None:
    board = busy({"starting": 10.0})
    board.did(StartWorker(worker_id="w2", card=SERVER.cards[1]), MOMENT)
    assert looks(board, 0, 10, phase="queued") == []
    assert "did not come up" in "".join(looks(board, 12, 1000, since=10, phase="queued"))
    board.saw(WorkerReady(at=MOMENT + 1001, worker_id="w2", info=WORKER_INFO))
    assert looks(board, 1002, 5000, phase="queued") == []


def test_a_new_phase_or_attempt_starts_the_clock_anew() -> None:
    board = busy({"load": 10.0, "compile": 10.0})
    assert looks(board, 0, 9) == []
    assert looks(board, 11, 20, phase="compile") == []
    again = dataclasses.replace(FIRST, attempt_id=f"{FIRST.job_id}-2", number=2)
    board.did(RunAttempt(attempt=again, worker_ids=("w1",)), MOMENT + 21)
    assert looks(board, 22, 31, phase="compile", running=again) == []
    assert looks(board, 33, since=31, phase="compile", running=again) != []


@pytest.mark.parametrize(
    ("phase", "settings", "limit"),
    [
        ("measure", {"warmup": 0, "time_limit_s": 7200.0}, PHASE_LIMITS_S["measure"] + 3 * 7200),
        ("measure", {"warmup": 1, "warmup_limit_s": 600.0, "time_limit_s": 60.0}, 1800 + 780),
        ("tokenize", {"warmup": 0, "time_limit_s": 7200.0}, PHASE_LIMITS_S["measure"] + 3 * 7200),
        ("warmup", {"warmup": 1, "warmup_limit_s": 5000.0}, PHASE_LIMITS_S["warmup"] + 5000),
        ("warmup", {"warmup": 0, "warmup_limit_s": 5000.0}, PHASE_LIMITS_S["warmup"]),
    ],
)
def test_phases_may_take_what_the_grid_allows(
    phase: str, settings: dict[str, Any], limit: float
) -> None:
    one = job(1)
    one = dataclasses.replace(one, measure=dataclasses.replace(one.measure, **settings))
    board = busy(running=attempt(one, SERVER.cards[0]))
    assert looks(board, 0, limit, phase=phase) == []
    assert looks(board, limit + 1, since=limit, phase=phase) != []


def test_a_new_worker_on_the_card_is_not_blamed_for_the_old() -> None:
    board = busy({"starting": 10.0, "load": 10.0})
    assert len(looks(board, 0, 11)) == 1 and not looks(board, 15, since=11)
    board.did(StartWorker(worker_id="w2", card=SERVER.cards[0]), MOMENT + 16)
    assert looks(board, 20, 24, since=15) == []
    assert looks(board, 28, since=24) != []


# ---------------------------------------------------------------- a clock that is set

HOURS_S = 7200
PATIENCE_S = 120.0


def started(settings: ScheduleSettings) -> Schedule:
    schedule = Schedule(planned(job(1), job(2)), settings, Fixed())
    schedule.handle(ClockSet(at=0.0, ahead_s=1e9))
    schedule.handle(NodeJoined(at=0.0, node=node(cards=1)))
    return schedule


def unrun(commands: list[Command]) -> list[State]:
    return [each.state for each in commands if isinstance(each, RecordRow) and not each.attempt]


def test_a_deadline_is_a_time_of_day() -> None:
    schedule = started(ScheduleSettings(work_until=1e9 + 1000))
    assert unrun(schedule.handle(Tick(at=1.0))) == []
    after = schedule.handle(ClockSet(at=2.0, ahead_s=1e9 + HOURS_S, by_s=HOURS_S))
    assert unrun(after) == [State.NOT_STARTED] * 2
    schedule = started(ScheduleSettings(work_until=1e9 + 1000))
    schedule.handle(ClockSet(at=2.0, ahead_s=1e9 - HOURS_S, by_s=-HOURS_S))
    assert unrun(schedule.handle(Tick(at=1200.0))) == []


def test_a_budget_is_a_length_of_time() -> None:
    for by_s in (HOURS_S, -HOURS_S):
        schedule = started(ScheduleSettings(work_until=1e9 + 1000, follow_clock=False))
        after = schedule.handle(ClockSet(at=2.0, ahead_s=1e9 + by_s, by_s=by_s))
        assert unrun([*after, *schedule.handle(Tick(at=3.0))]) == []
        assert unrun(schedule.handle(Tick(at=1001.0))) == [State.NOT_STARTED] * 2


def test_a_row_that_the_schedule_makes_has_the_time_of_day() -> None:
    cluster = busy_cluster(job(1))
    cluster.see(ClockSet(at=cluster.now, ahead_s=2e9, by_s=1e9))
    cluster.leave("n1")
    (row,) = cluster.rows
    assert row.outcome is not None and row.outcome.ranks[0].ended_at == 2e9 + cluster.now


def test_a_call_comes_at_its_time_of_day_though_the_clock_is_set() -> None:
    now, called = [1000.0], threading.Event()
    cancelled = threading.Event()
    CallAt(1000.0 + HOURS_S, called.set, wall=lambda: now[0], look_every_s=0.01)
    CallAt(2000.0, cancelled.set, wall=lambda: now[0], look_every_s=0.01).cancel()
    assert not called.wait(0.1)
    now[0] += HOURS_S
    assert called.wait(PATIENCE_S) and not cancelled.wait(0.1)


def test_what_lasts_is_not_measured_by_a_clock_that_is_set(monkeypatch) -> None:
    lasted = Interval()
    monkeypatch.setattr("time.time", lambda: lasted.started_at - HOURS_S)
    assert 0 <= lasted.until_now() - lasted.started_at < PATIENCE_S


@pytest.mark.parametrize(("by_s", "words"), [(7200.0, "forward by 2h00m"), (-60.0, "back by 1m")])
def test_a_clock_that_is_set_is_told(by_s: float, words: str) -> None:
    board = Board(run="night", plan=plan(), started_at=0.0)
    assert words in event_line(ClockSet(at=1.0, ahead_s=0.0, by_s=by_s), board)
