"""Progress as plain lines for logs, or as a live display, both from ``RunStatus`` and events."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.core import events
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.status import Answered, BestSoFar, CardStatus, FailedAttempt, RunStatus
from orchestrator.driver.board import Board
from orchestrator.scheduler.repeats import WON
from orchestrator.util import output
from orchestrator.util.format import duration, number, one_line, plural
from orchestrator.util.redaction import redact

REASON_LENGTH = 160
#: Message after each number of stop requests.
_NEXT_STOP = {
    1: "; running jobs end first and no more start. A second one stops them, too, each with its "
    "row. The same command resumes the run",
    2: "; running jobs are stopped, each with its row. A third one ends at once. The same command "
    "resumes the run",
}


def left_text(middle_s: float, low_s: float | None, high_s: float | None) -> str:
    """Format as ``about 3m05s``, or ``1m10s to 12m40s`` or ``up to 12m40s`` if uncertain."""
    if low_s is None or high_s is None:
        return f"about {duration(middle_s)}"
    return f"{duration(low_s)} to {duration(high_s)}" if low_s >= 1 else f"up to {duration(high_s)}"


def summary_line(status: RunStatus) -> str:
    """Return counts, cards and time in one line."""
    parts = [f"{status.done}/{status.total} jobs"]
    parts += [f"{count} {state}" for state, count in sorted(status.counts.items()) if count]
    emulated = " emulated" if status.emulated else ""
    if status.cards:  # none while a run waits
        parts.append(f"{status.assigned}/{len(status.cards)}{emulated} cards assigned")
    # Phases in which a card computes nothing.
    phases = Counter(card.phase for card in status.cards)
    for phase, words in (("starting", "starting"), ("queued", "waiting for the processor")):
        parts += [f"{phases[phase]} {words}"] if phases[phase] else []
    parts += rate_texts(status)
    parts += [text] if (text := flags_text(status)) else []
    parts.append(f"{duration(status.elapsed_s)} so far")
    if status.eta_s and not status.finished:
        parts.append(f"{left_text(status.eta_s, status.eta_low_s, status.eta_high_s)} left")
    if status.slow_cards:
        parts.append(plural(len(status.slow_cards), "slow card"))
    parts += [f"{what}: {why}" for what, why in _notes(status).items()]
    parts += map(answer_text, status.answers)
    parts += map(best_text, status.best[: 0 if status.answers else 1])
    if status.driver_died:
        parts.append("NO DRIVER: it died; the same `nightgrid run` or `submit` resumes it")
    return " | ".join(parts)


def _notes(status: RunStatus) -> dict[str, str]:
    """Return why the run does not just go on, by kind."""
    notes = {"WAITING": status.waiting, "PAUSED": status.paused, "TROUBLE": status.trouble}
    if status.finished and status.stopping:
        measured = f"{status.measured:,} of {plural(status.total, 'job')} measured"
        notes[f"STOPPED ({status.stopping})"] = measured  # as the report has it
    else:
        notes["stopping"] = status.stopping
    return {what: why for what, why in notes.items() if why}


def rate_texts(status: RunStatus) -> list[str]:
    """Return ``1,204 tokens/s (12 jobs)`` for each unit, and jobs per hour; empty at first."""
    texts = [
        f"{number(rate.per_s, 3)} {rate.unit} ({plural(rate.jobs, 'job')})" for rate in status.rates
    ]
    per_h = status.jobs_per_h
    return texts if per_h is None else [*texts, f"{number(per_h, 3)} jobs/h"]


def event_line(event: events.Event, board: Board) -> str | None:
    """Return a line for an event of interest to users, else None."""
    if isinstance(event, events.NodeJoined):
        node = event.node
        kind = node.device_name or node.accelerator.value
        cards = plural(len(node.card_indices), f"{node.accelerator} card")
        note = " (emulated)" if node.emulated and "emulated" not in kind else ""
        return f"node {node.name}: {cards}, {kind}{note}"
    if isinstance(event, events.NodeLeft):
        return f"LOST node {board.node_name(event.node_id)}: {event.reason}"
    if isinstance(event, events.WorkerStopped) and event.failure is not None:
        return f"worker {event.worker_id} died: {event.failure.message}"
    if isinstance(event, events.StopRequested):
        return f"stopping: {event.reason}{_NEXT_STOP.get(board.stop_requests, '')}"
    if isinstance(event, events.ClockSet) and event.by_s:
        sign = "forward" if event.by_s > 0 else "back"
        return f"this machine's clock was set {sign} by {duration(abs(event.by_s))}"
    return None


def row_line(command: events.RecordRow, measurement: Measurement, board: Board) -> str:
    """Return a row's line: progress, state, job, place and figure."""
    job = command.attempt.job if command.attempt else command.job
    ordinal = f"[{board.done}/{board.total}]" if command.final else "[attempt]"
    ordinal = "[repeat]" if command.repeat else ordinal
    line = f"{ordinal} {command.state.value:<13} {board.label(job)}"
    cards = command.attempt.cards if command.attempt else ()
    if cards:
        line += f" on {board.card_name(cards[0])}"
    if len(cards) > 1:
        line += f" and {len(cards) - 1} more"
    metrics = measurement.metrics
    if metrics.throughput:
        rate = f"{metrics.throughput:,.1f} {metrics.throughput_unit}"
        line += f": {rate}{half_width_text(metrics.relative_half_width)}"
    if measurement.reason and command.state is not State.SUCCEEDED:
        line += f": {shortened(measurement.reason)}"
    elif command.repeat:
        row = "earlier row of a winner" if measurement.reason.startswith(WON) else "flagged row"
        line += f", replaces the {row}" if command.final else ", no better: that row stands"
    elif command.final and (flags := board.flags(job)):
        line += f" FLAGGED {flags}"
    return line


def flags_text(status: RunStatus) -> str:
    """Return how many rows stand that are flagged, by flag, and how many repeats there were."""
    flags = [f"{count} {name}" for name, count in status.flag_counts.items()]
    parts = [f"flagged rows: {', '.join(flags)}"] if flags else []
    parts += [plural(status.repeats, "repeat")] if status.repeats else []
    return ", ".join(parts)


def best_text(best: BestSoFar) -> str:
    """Return the fastest row of one piece of work, and why it is provisional."""
    provisional = f" (provisional: {best.provisional})" if best.provisional else ""
    rate = f"{number(best.per_s, 3)} {best.unit}"
    return f"best of {best.rows} so far: {best.job} {rate}{provisional}"


def answer_text(answer: Answered) -> str:
    """Return the present answer to a question."""
    return f"{answer.question}: {answer.sentence} ({answer.basis})"


def unrun_lines(commands: Sequence[events.RecordRow], board: Board) -> list[str]:
    """Return a line per state and reason for unrun jobs, of which a stop can end thousands."""
    groups: dict[tuple[State, str], list[events.RecordRow]] = {}
    for command in commands:
        groups.setdefault((command.state, command.reason), []).append(command)
    lines = []
    for (state, reason), group in groups.items():
        what = board.label(group[0].job) if len(group) == 1 else f"{len(group)} jobs"
        end = f": {shortened(reason)}" if reason else ""
        lines.append(f"[{board.done}/{board.total}] {state.value:<13} {what}{end}")
    return lines


def shortened(reason: str) -> str:
    """Return a reason on one line; report and row have all of it."""
    return one_line(reason, REASON_LENGTH)


def half_width_text(relative: float | None) -> str:
    """Format half of an interval as `` ±2.1%``; "" if it is unknown."""
    return "" if relative is None else f" ±{100 * relative:.1f}%"


def printable(text: str) -> str:
    """Redact this process's secrets, and replace control characters by spaces."""
    clean = redact(text, os.environ)
    return "".join(char if char.isprintable() else " " for char in clean)


#: Seconds between summary lines in a log.
SUMMARY_INTERVAL_S = 120.0


class View:
    """Display of a run's progress; the base class shows nothing."""

    def line(self, text: str) -> None:
        """Print one event."""

    def show(self, status: RunStatus) -> None:
        """Show the run's status; called about once a second."""

    def close(self) -> None:
        """Restore the terminal."""


class PlainView(View):
    """Lines with a time of day, for logs; never a control code."""

    def __init__(self, stream: TextIO, *, interval_s: float = SUMMARY_INTERVAL_S) -> None:
        self._stream = output.guarded(stream, patience_s=output.PATIENCE_S)
        self._interval_s = interval_s
        self._next_summary_at: float | None = None  # in seconds of the run

    def line(self, text: str) -> None:
        output.say(f"{time.strftime('%H:%M:%S')} {printable(text)}", self._stream)

    def show(self, status: RunStatus) -> None:
        elapsed_s = status.elapsed_s
        if self._next_summary_at is None:
            self._next_summary_at = elapsed_s + self._interval_s
        if elapsed_s >= self._next_summary_at or status.finished:
            self._next_summary_at = elapsed_s + self._interval_s
            self.line(summary_line(status))


def open_view(*, quiet: bool = False) -> View:
    """Return the view that suits standard output."""
    if quiet:
        return View()
    stream = output.guarded(sys.stdout, patience_s=output.PATIENCE_S)
    if not stream.isatty():
        return PlainView(stream)
    return TerminalView(output.console(stream))


# The live display. Sixty-four cards do not fit twenty-four lines, so they are folded, not cut.

SHOWN_FAILURES = 3
SHOWN_BEST = 2
#: Lines of the terminal left for scrolling output.
SCROLLING_LINES = 5
#: One letter per phase, for cards without more room.
_LETTERS = {
    "free": "·",
    "idle": "-",
    "starting": "s",
    "start": "s",
    "install": "i",
    "queued": "q",
    "load": "L",
    "compile": "C",
    "warmup": "W",
    "measure": "M",
    "finish": "f",
}
_LEGEND = (
    "M measure, W warmup, L load, C compile, s start, i install, q queued, f finish, - idle, · free"
)
_GOOD = {State.SUCCEEDED.value, "reused"}
_EXPECTED = {State.UNSUPPORTED.value, State.PRUNED.value, State.OUT_OF_MEMORY.value}


def render(status: RunStatus, *, height: int | None = None) -> RenderableType:
    """Return the live display, with cards folded or counted to fit ``height``."""
    left = ""
    if status.eta_s:
        left = f", {left_text(status.eta_s, status.eta_low_s, status.eta_high_s)} left"
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(status.run, style="bold"),
        ProgressBar(total=max(1, status.total), completed=status.done, width=40),
        Text(f"{status.done}/{status.total}  {duration(status.elapsed_s)}{left}"),
    )
    counts = Text(overflow="ellipsis", no_wrap=True)
    for state, count in sorted(status.counts.items()):
        counts.append(f"{count} {state}  ", style=_style(state))
    if status.emulated:
        counts.append("EMULATED CARDS", style="magenta")
    assigned = f"{status.assigned}/{len(status.cards)} cards assigned"
    rates = Text("   ".join([assigned, *rate_texts(status)]), overflow="ellipsis", no_wrap=True)
    failures = status.failures[:SHOWN_FAILURES]
    after: list[RenderableType] = [_failure_lines(failures, status.at)] if failures else []
    answers = map(answer_text, status.answers[:SHOWN_BEST])
    standing = [flags_text(status), *answers, *map(best_text, status.best[:SHOWN_BEST])]
    for text in filter(None, standing):
        after.append(Text(text, style="cyan", overflow="ellipsis", no_wrap=True))
    notes = _notes(status)
    for what, why in notes.items():
        text = f"{what}: {shortened(why)}"
        after.append(Text(text, style="yellow", overflow="ellipsis", no_wrap=True))
    room = None if height is None else max(1, height - 3 - len(after) - max(0, len(failures) - 1))
    return Group(bar, counts, rates, _card_lines(status.cards, room), *after)


def _card_lines(cards: Sequence[CardStatus], room: int | None) -> RenderableType:
    """Return the cards in at most ``room`` lines, heading included."""
    working = [card for card in cards if card.worker_id]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    if room is None or len(working) < room:
        _add_columns(table, "card", "phase", "for", "job")
        for card in working:
            words = (card.card, card.phase, duration(card.phase_age_s), card.job)
            _add_row(table, *words, style="" if card.job else "dim")
        return table
    _add_columns(table, "server", "cards", "assigned", f"longest in its phase   ({_LEGEND})")
    servers: dict[str, list[CardStatus]] = {}
    for card in cards:
        servers.setdefault(card.card.rpartition("/")[0], []).append(card)
    shown = list(servers.items())
    if len(shown) >= room:
        shown = shown[: max(0, room - 2)]
    for name, group in shown:
        letters = "".join(_LETTERS.get(card.phase, "?") for card in group)
        at_work = [card for card in group if card.job]
        oldest = max(at_work, key=lambda card: card.phase_age_s, default=None)
        about = ""
        if oldest is not None:
            index = oldest.card.rpartition("/")[2]
            about = f"{index} {oldest.phase} {duration(oldest.phase_age_s)}  {oldest.job}"
        _add_row(table, name, letters, f"{len(at_work)}/{len(group)}", about)
    hidden = [card for _, group in list(servers.items())[len(shown) :] for card in group]
    if hidden:
        phases = Counter(card.phase for card in hidden)
        text = ", ".join(f"{count} {phase}" for phase, count in phases.most_common())
        _add_row(table, "…", "", "", f"{len(hidden)} more cards: {text}")
    return table


def _add_columns(table: Table, *headers: str) -> None:
    """Add columns, the last of which shrinks on a narrow terminal."""
    for header in headers[:-1]:
        table.add_column(header, no_wrap=True)
    table.add_column(Text(headers[-1], no_wrap=True, overflow="ellipsis"))


def _add_row(table: Table, *words: str, style: str = "") -> None:
    """Add a row of one line; plain strings would have [brackets] parsed as markup."""
    table.add_row(*(Text(word, no_wrap=True, overflow="ellipsis") for word in words), style=style)


def _failure_lines(failures: Sequence[FailedAttempt], now: float) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for ratio in (None, 2, 3):
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    for failure in failures:
        again = "" if failure.final else ", tried again"
        table.add_row(
            Text(
                f"{failure.state} {duration(now - failure.at)} ago{again}",
                style=_style(failure.state) if failure.final else "yellow",
            ),
            Text(failure.job),
            Text(f"{failure.failure_class or 'failed'}: {shortened(failure.reason)}", style="dim"),
        )
    return table


def _style(state: str) -> str:
    return "green" if state in _GOOD else "yellow" if state in _EXPECTED else "red"


class TerminalView(View):
    """Lines scroll above a display that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Cropped: a display higher than the terminal cannot be removed again.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="crop"
        )
        self._live.start()

    def line(self, text: str) -> None:
        """Print one event above the display."""
        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {printable(text)}"))

    def show(self, status: RunStatus) -> None:
        """Redraw."""
        height = max(SCROLLING_LINES, self._console.height - SCROLLING_LINES)
        self._live.update(render(status, height=height), refresh=True)

    def close(self) -> None:
        """Remove the display."""
        self._live.stop()
