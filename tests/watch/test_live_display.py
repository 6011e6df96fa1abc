"""The live display fits into the terminal and hides nothing, however many cards there are."""

import dataclasses
import io

import pytest
from driver_cases import MOMENT, STATUS
from rich.console import Console

from orchestrator.core.status import CardStatus, FailedAttempt, Rate, RunStatus
from orchestrator.watch.live import TerminalView, render


def text_of(status: RunStatus, *, height: int | None = None, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(status, height=height))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


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
    return dataclasses.replace(STATUS, cards=tuple(cards))


def test_the_display_shows_bar_counts_and_busy_cards() -> None:
    text = text_of(STATUS)
    assert "17/48" in text and "about 2m10s left" in text and "EMULATED" in text
    assert "hpu-1/HPU0" in text and "measure" in text and "12s" in text
    assert "hpu-1/HPU1" in text and "hpu-1/HPU2" not in text


def test_markup_in_names_is_shown_and_not_obeyed() -> None:
    card = dataclasses.replace(STATUS.cards[0], job="[bold]x[/bold]")
    assert "[bold]x[/bold]" in text_of(dataclasses.replace(STATUS, cards=(card,)))


def test_the_terminal_view_prints_lines_above_the_display_and_removes_it() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    view = TerminalView(console)
    view.show(STATUS)
    view.line("node hpu-1: [2 cards]")
    view.close()
    assert "node hpu-1: [2 cards]" in out.getvalue()


@pytest.mark.parametrize("height", [8, 12, 19, 40, 80])
@pytest.mark.parametrize("servers", [1, 8, 30])
def test_any_number_of_cards_fits_into_any_height(servers: int, height: int) -> None:
    """The display is never higher than the room it is given, so it can always be removed again."""
    assert len(text_of(big_status(servers), height=height).splitlines()) <= height


def test_cards_that_do_not_fit_are_folded_by_server() -> None:
    lines = text_of(big_status(8), height=19).splitlines()
    (second,) = [line for line in lines if line.startswith("hpu-2")]
    assert second.split() == ["hpu-2", "LMMMMMMM", "8/8", "HPU3", "measure", "8m20s", "job-2-3"]
    assert sum(line.startswith("hpu-") for line in lines) == 8


def test_servers_that_do_not_fit_are_counted() -> None:
    text = text_of(big_status(30), height=12)
    shown = sum(line.startswith("hpu-") for line in text.splitlines())
    hidden = 30 - shown
    assert f"{8 * hidden} more cards: {7 * hidden} measure, {hidden} load" in text


def test_rates_stand_apart_by_unit() -> None:
    rates = (
        Rate(unit="tokens/s", per_s=1204.4, jobs=12),
        Rate(unit="samples/s", per_s=8.123, jobs=1),
    )
    text = text_of(dataclasses.replace(STATUS, rates=rates, jobs_run=13))
    assert (
        "1/3 cards assigned   1,204 tokens/s (12 jobs)   8.12 samples/s (1 job)   720 jobs/h"
        in text
    )


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
    text = text_of(dataclasses.replace(STATUS, failures=failures))
    first, second, _ = (" ".join(line.split()) for line in text.splitlines()[-3:])
    assert first == "FAILED 5s ago, tried again job-0 crash: died of SIGSEGV"
    assert second == "FAILED 6s ago job-1 crash: died of SIGSEGV"
    assert "job-2" in text and "job-3" not in text
    narrow = text_of(dataclasses.replace(STATUS, failures=failures), width=70).splitlines()
    assert len(narrow) == len(text.splitlines())
