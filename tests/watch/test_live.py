"""Progress: one plain line an event in logs, bars and cards in a terminal."""

import dataclasses
import io
import os
import re

import pytest
from driver_cases import MOMENT, STATUS, attempt, job, node, plan, result

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import NodeJoined, NodeLeft, RecordRow, WorkerStopped
from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.status import Rate
from orchestrator.driver.board import Board
from orchestrator.util.format import duration
from orchestrator.watch.live import (
    PlainView,
    QuietView,
    event_line,
    open_view,
    row_line,
    summary_line,
    unrun_lines,
)


@pytest.fixture
def board() -> Board:
    board = Board(run="night", plan=plan(job(1)), started_at=MOMENT)
    board.saw(NodeJoined(at=MOMENT, node=node()))
    return board


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0s"), (59.4, "59s"), (61, "1m01s"), (3600, "1h00m"), (-3, "0s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_summary_line_has_counts_cards_and_time() -> None:
    assert summary_line(STATUS) == (
        "17/48 jobs | 2 FAILED | 15 SUCCEEDED | 1/3 emulated cards assigned | 1 starting | "
        "1m05s so far | about 2m10s left"
    )


def test_a_card_that_waits_for_the_processor_is_not_called_busy() -> None:
    cards = [dataclasses.replace(card, phase="queued") for card in STATUS.cards]
    queued = dataclasses.replace(STATUS, cards=cards, eta_low_s=0.0, eta_high_s=3495.0)
    line = summary_line(queued)
    assert "3 waiting for the processor" in line and line.endswith("up to 58m15s left")
    assert "cards" not in summary_line(dataclasses.replace(queued, cards=()))


def test_the_summary_line_has_tokens_and_samples_apart_and_jobs_by_the_hour() -> None:
    rates = (
        Rate(unit="tokens/s", per_s=1204.4, jobs=12),
        Rate(unit="samples/s", per_s=8.123, jobs=1),
    )
    line = summary_line(dataclasses.replace(STATUS, rates=rates, jobs_run=13))
    assert "1,204 tokens/s (12 jobs) | 8.12 samples/s (1 job) | 720 jobs/h | 1m05s" in line


def test_a_finished_run_promises_no_time() -> None:
    ended = dataclasses.replace(STATUS, finished=True, stopping="SIGTERM received")
    assert "left" not in summary_line(ended)
    assert summary_line(ended).endswith("stopping: SIGTERM received")


def test_a_row_says_how_far_what_where_and_how_fast(board: Board) -> None:
    command = _row(State.SUCCEEDED)
    measurement = measurement_of(command, run="night", invocation_id="i", recorded_at=MOMENT)
    board.did(command, MOMENT)
    line = row_line(command, measurement, board)
    assert re.fullmatch(r"\[1/1\] SUCCEEDED +fp32 b=1 on hpu-1/HPU0: 10\.0 tokens/s ±0\.0%", line)


def test_a_failed_row_says_why(board: Board) -> None:
    command = dataclasses.replace(_row(State.FAILED), reason="error: no such layer", final=False)
    measurement = measurement_of(command, run="night", invocation_id="i", recorded_at=MOMENT)
    line = row_line(command, measurement, board)
    assert line.startswith("[attempt] FAILED")
    assert line.endswith("on hpu-1/HPU0: error: no such layer")


def test_jobs_that_never_ran_share_a_line_by_state_and_reason(board: Board) -> None:
    rows = [
        RecordRow(job=job(batch), state=State.UNSUPPORTED, reason="no fp8 on HPU", final=True)
        for batch in (1, 2)
    ]
    rows.append(RecordRow(job=job(4), state=State.NOT_STARTED, reason="stopped", final=True))
    for row in rows:
        board.did(row, MOMENT)
    assert unrun_lines(rows, board) == [
        "[3/1] UNSUPPORTED   2 jobs: no fp8 on HPU",
        "[3/1] NOT_STARTED   tiny-chatglm3 text-generation fp32 b=4 HPU: stopped",
    ]
    assert unrun_lines([], board) == []


def test_long_reasons_are_shortened_in_a_line(board: Board) -> None:
    long = RecordRow(job=job(1), state=State.UNSUPPORTED, reason="x " * 500, final=True)
    (line,) = unrun_lines([long], board)
    assert len(line) < 260 and line.endswith("…")


def test_a_log_that_nobody_reads_any_more_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        view = PlainView(stream)
        for _ in range(3):
            view.line("still measuring")


def test_people_hear_of_nodes_and_deaths_but_not_of_orderly_stops(board: Board) -> None:
    assert event_line(NodeJoined(at=MOMENT, node=node()), board) == (
        "node hpu-1: 2 HPU cards, emulated HPU on CPU"
    )
    gone = NodeLeft(at=MOMENT, node_id=node().node_id, reason="missed heartbeats")
    assert event_line(gone, board) == "LOST node hpu-1: missed heartbeats"
    death = Failure(failure_class=FailureClass.CRASH, message="died of SIGSEGV")
    stopped = WorkerStopped(at=MOMENT, worker_id="w1", failure=death)
    assert event_line(stopped, board) == "worker w1 died: died of SIGSEGV"
    assert event_line(dataclasses.replace(stopped, failure=None), board) is None


def test_trouble_with_the_cluster_is_in_the_summary() -> None:
    silent = "the cluster's control store has not answered since 03:00:00, for 12 s"
    assert f"TROUBLE: {silent}" in summary_line(dataclasses.replace(STATUS, trouble=silent))
    assert "TROUBLE" not in summary_line(STATUS)


def test_logs_hold_no_control_characters_and_one_line_an_event() -> None:
    out = io.StringIO()
    PlainView(out).line("FAILED: \x1b[31mred\nsecond\rthird\x07")
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().rstrip("\n").isprintable()


def test_summaries_come_at_intervals_and_at_the_end() -> None:
    out = io.StringIO()
    view = PlainView(out, interval_s=30)
    for second in range(62):
        view.show(dataclasses.replace(STATUS, at=MOMENT + second))
    assert out.getvalue().count("17/48 jobs") == 2
    view.show(dataclasses.replace(STATUS, at=MOMENT + 63, finished=True))
    assert out.getvalue().count("17/48 jobs") == 3


def test_the_view_suits_the_stream() -> None:
    out = io.StringIO()
    assert isinstance(open_view(stream=out), PlainView)
    quiet = open_view(quiet=True, stream=out)
    assert isinstance(quiet, QuietView)
    quiet.line("x")
    quiet.show(STATUS)
    assert out.getvalue() == ""


def _row(state: State) -> RecordRow:
    tried = attempt(job(1), node().cards[0])
    good = state is State.SUCCEEDED
    rank = RankOutcome(
        rank=0,
        state=state,
        started_at=MOMENT,
        ended_at=MOMENT + 4,
        result=result() if good else None,
    )
    outcome = Outcome(attempt_id=tried.attempt_id, state=state, ranks=(rank,))
    return RecordRow(job=job(1), state=state, reason="", final=True, attempt=tried, outcome=outcome)
