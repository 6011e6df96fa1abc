"""Progress: one plain line an event in logs, bars and cards in a terminal."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from typing import Any

import pytest
from driver_cases import MOMENT, STATUS, attempt, job, node, plan, result
from rich.console import Console

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import NodeJoined, NodeLeft, RecordRow, WorkerStopped
from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.status import Answered, CardStatus, FailedAttempt, Rate, RunStatus
from orchestrator.driver.board import Board
from orchestrator.scheduler.repeats import FLAGGED, WON
from orchestrator.watch.live import (
    PlainView,
    TerminalView,
    View,
    event_line,
    open_view,
    render,
    row_line,
    summary_line,
    unrun_lines,
)


def a_row(state: State) -> RecordRow:
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


def line_of(command: RecordRow, board: Board) -> str:
    measurement = measurement_of(command, run="night", invocation_id="i", recorded_at=MOMENT)
    return row_line(command, measurement, board)


@pytest.fixture
def board() -> Board:
    board = Board(run="night", plan=plan(job(1)), started_at=MOMENT)
    board.saw(NodeJoined(at=MOMENT, node=node()))
    return board


QUEUED = tuple(replace(card, phase="queued") for card in STATUS.cards)
ANSWER = Answered(
    question="best ttft_s",
    figure="ttft_s",
    job="b=8",
    value=0.25,
    bound="at most",
    probability=0.84,
    confidence=0.9,
    within=0.02,
    times=2,
    apart=0.012,
    measured=9,
    failed=3,
)
SILENT = "the cluster's control store has not answered since 03:00:00, for 12 s"
RATES = (
    Rate(unit="tokens/s", per_s=1204.4, jobs=12),
    Rate(unit="samples/s", per_s=8.123, jobs=1),
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "17/48 jobs | 2 FAILED | 15 SUCCEEDED | 1/3 emulated cards assigned | 1 starting | "
            "1m05s so far | about 2m10s left",
        ),
        # Emulated cards take turns, and zero seconds left are no estimate.
        (
            {"cards": QUEUED, "eta_low_s": 0.0, "eta_high_s": 3495.0},
            "17/48 jobs | 2 FAILED | 15 SUCCEEDED | 1/3 emulated cards assigned | "
            "3 waiting for the processor | 1m05s so far | up to 58m15s left",
        ),
        (
            {"cards": (), "rates": RATES, "jobs_run": 13},
            "17/48 jobs | 2 FAILED | 15 SUCCEEDED | 1,204 tokens/s (12 jobs) | "
            "8.12 samples/s (1 job) | 720 jobs/h | 1m05s so far | about 2m10s left",
        ),
        (
            {"cards": (), "finished": True, "stopping": "SIGTERM received"},
            "17/48 jobs | 2 FAILED | 15 SUCCEEDED | 1m05s so far | "
            "STOPPED (SIGTERM received): 15 of 48 jobs measured",
        ),
        (
            {"cards": (), "eta_s": None, "answers": (ANSWER,)},
            "17/48 jobs | 2 FAILED | 15 SUCCEEDED | 1m05s so far | best ttft_s: b=8 (ttft_s at "
            "most 0.2500), within 2% of the best with probability 0.84 (cells: 9 measured, 3 "
            "failed; confidence 0.90 not reached; it was measured 2 times, 1.2% apart)",
        ),
        (
            {"cards": (), "eta_s": None, "trouble": SILENT},
            f"17/48 jobs | 2 FAILED | 15 SUCCEEDED | 1m05s so far | TROUBLE: {SILENT}",
        ),
    ],
)
def test_the_summary_line_has_counts_cards_and_time(changes: dict[str, Any], line: str) -> None:
    assert summary_line(replace(STATUS, **changes)) == line


def test_a_row_says_how_far_what_where_and_how_fast_or_why_not(board: Board) -> None:
    board.did(a_row(State.SUCCEEDED), MOMENT)
    line = line_of(a_row(State.SUCCEEDED), board)
    assert re.fullmatch(r"\[1/1\] SUCCEEDED +fp32 b=1 on hpu-1/HPU0: 10\.0 tokens/s ±0\.0%", line)
    line = line_of(replace(a_row(State.FAILED), reason="error: no layer", final=False), board)
    assert line.startswith("[attempt] FAILED")
    assert line.endswith("on hpu-1/HPU0: error: no layer")


@pytest.mark.parametrize(
    ("reason", "end"),
    [(FLAGGED, "replaces the flagged row"), (WON, "replaces the earlier row of a winner")],
)
def test_a_repeat_says_which_row_it_replaces(board: Board, reason: str, end: str) -> None:
    line = line_of(replace(a_row(State.SUCCEEDED), reason=f"{reason}: so", repeat=1), board)
    assert line.startswith("[repeat] SUCCEEDED") and line.endswith(f", {end}")


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
    death = Failure(FailureClass.CRASH, "died of SIGSEGV")
    stopped = WorkerStopped(at=MOMENT, worker_id="w1", failure=death)
    assert event_line(stopped, board) == "worker w1 died: died of SIGSEGV"
    assert event_line(replace(stopped, failure=None), board) is None


def test_logs_hold_no_control_characters_and_one_line_an_event() -> None:
    out = io.StringIO()
    PlainView(out).line("FAILED: \x1b[31mred\nsecond\rthird\x07")
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().rstrip("\n").isprintable()


def test_summaries_come_at_intervals_and_at_the_end() -> None:
    out = io.StringIO()
    view = PlainView(out, interval_s=30)
    for second in range(62):
        view.show(replace(STATUS, at=MOMENT + second))
    assert out.getvalue().count("17/48 jobs") == 2
    view.show(replace(STATUS, at=MOMENT + 63, finished=True))
    assert out.getvalue().count("17/48 jobs") == 3


def test_the_view_suits_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(open_view(), PlainView)
    quiet = open_view(quiet=True)
    quiet.line("x")
    quiet.show(STATUS)
    assert type(quiet) is View and capsys.readouterr().out == ""


# ---------------------------------------------------------------- the live display


def text_of(status: RunStatus, *, height: int | None = None, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(status, height=height))
    return console.file.getvalue()


def big_status(servers: int) -> RunStatus:
    cards = [
        CardStatus(
            card=f"hpu-{server}/HPU{index}",
            worker_id=f"w{server}{index}",
            phase="measure" if index else "load",
            phase_age_s=500.0 if (server, index) == (2, 3) else 10.0,
            job=f"job-{server}-{index}",
            attempt_id=f"a-{server}-{index}",
        )
        for server in range(1, servers + 1)
        for index in range(8)
    ]
    return replace(STATUS, cards=tuple(cards))


def test_the_display_shows_bar_counts_and_busy_cards() -> None:
    text = text_of(STATUS)
    assert "17/48" in text and "about 2m10s left" in text and "EMULATED" in text
    assert "hpu-1/HPU0" in text and "measure" in text and "12s" in text
    assert "hpu-1/HPU1" in text and "hpu-1/HPU2" not in text
    rates = "1,204 tokens/s (12 jobs)   8.12 samples/s (1 job)   720 jobs/h"
    assert f"1/3 cards assigned   {rates}" in text_of(replace(STATUS, rates=RATES, jobs_run=13))
    marked = replace(STATUS.cards[0], job="[bold]x[/bold]")
    assert "[bold]x[/bold]" in text_of(replace(STATUS, cards=(marked,))), "markup is not obeyed"


def test_the_terminal_view_prints_lines_above_the_display_and_removes_it() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    view = TerminalView(console)
    view.show(STATUS)
    view.line("node hpu-1: [2 cards]")
    view.close()
    assert "node hpu-1: [2 cards]" in out.getvalue()


@pytest.mark.parametrize("servers", [1, 8, 30])
def test_any_number_of_cards_fits_into_any_height(servers: int) -> None:
    """The display is never higher than the room it is given, so it can always be removed again."""
    for height in (8, 12, 19, 40, 80):
        assert len(text_of(big_status(servers), height=height).splitlines()) <= height


def test_cards_that_do_not_fit_are_folded_by_server_and_servers_are_counted() -> None:
    lines = text_of(big_status(8), height=19).splitlines()
    (second,) = [line for line in lines if line.startswith("hpu-2")]
    assert second.split() == ["hpu-2", "LMMMMMMM", "8/8", "HPU3", "measure", "8m20s", "job-2-3"]
    assert sum(line.startswith("hpu-") for line in lines) == 8
    text = text_of(big_status(30), height=12)
    shown = sum(line.startswith("hpu-") for line in text.splitlines())
    hidden = 30 - shown
    assert f"{8 * hidden} more cards: {7 * hidden} measure, {hidden} load" in text


def test_the_last_three_failures_say_job_class_and_reason() -> None:
    failures = tuple(
        FailedAttempt(
            at=MOMENT + 60 - number,
            job=f"job-{number}",
            state="FAILED",
            failure_class="crash",
            reason="died of\nSIGSEGV",
            card="hpu-1/HPU1",
            final=number > 0,
        )
        for number in range(5)
    )
    text = text_of(replace(STATUS, failures=failures))
    first, second, _ = (" ".join(line.split()) for line in text.splitlines()[-3:])
    assert first == "FAILED 5s ago, tried again job-0 crash: died of SIGSEGV"
    assert second == "FAILED 6s ago job-1 crash: died of SIGSEGV"
    assert "job-2" in text and "job-3" not in text
    narrow = text_of(replace(STATUS, failures=failures), width=70).splitlines()
    assert len(narrow) == len(text.splitlines())
