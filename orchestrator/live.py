"""Progress for people: plain lines where output is logged, a live display in a terminal.

`ray job logs` and log files want one line an event and no control codes; a person at a terminal
wants bars, the cards and the time left. Both are drawn from the same ``RunStatus`` and the same
events by pure functions; the two views only write.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from orchestrator.events import Event, NodeJoined, NodeLeft, RecordRow, StopRequested, WorkerStopped
from orchestrator.job import State
from orchestrator.measurement import Measurement
from orchestrator.run_status import Board, RunStatus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: Seconds between summary lines in a log.
SUMMARY_INTERVAL_S = 30.0
REASON_LENGTH = 160
_GOOD = {State.SUCCEEDED.value, "reused"}
_EXPECTED = {State.UNSUPPORTED.value, State.PRUNED.value, State.OUT_OF_MEMORY.value}


class View(Protocol):
    """Where a run's progress is shown."""

    def line(self, text: str) -> None:
        """Say one thing that happened."""

    def show(self, status: RunStatus) -> None:
        """Show how the run stands; called about once a second."""

    def close(self) -> None:
        """Leave the terminal as it was."""


# ---------------------------------------------------------------- pure rendering


def duration(seconds: float) -> str:
    """``42s``, ``3m05s``, ``2h07m``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def summary_line(status: RunStatus) -> str:
    """Counts, cards, time: one line."""
    parts = [f"{status.done}/{status.total} jobs"]
    parts += [f"{count} {state}" for state, count in sorted(status.counts.items()) if count]
    busy = sum(1 for card in status.cards if card.attempt_id)
    starting = sum(1 for card in status.cards if card.phase == "starting")
    emulated = " emulated" if status.emulated else ""
    parts.append(f"{busy}/{len(status.cards)}{emulated} cards busy")
    if starting:
        parts.append(f"{starting} starting")
    parts.append(f"{duration(status.at - status.started_at)} so far")
    if status.eta_s and not status.finished:
        parts.append(f"about {duration(status.eta_s)} left")
    if status.stopping:
        parts.append(f"stopping: {status.stopping}")
    return " | ".join(parts)


def event_line(event: Event, board: Board) -> str | None:
    """A line for an event that people want to know of; None for the others."""
    if isinstance(event, NodeJoined):
        node = event.node
        kind = node.device_name or node.accelerator.value
        cards = f"{len(node.card_indices)} {node.accelerator} cards"
        return f"node {node.name}: {cards}, {kind}{_emulated_note(node.emulated, kind)}"
    if isinstance(event, NodeLeft):
        return f"LOST node {board.node_name(event.node_id)}: {event.reason}"
    if isinstance(event, WorkerStopped) and event.failure is not None:
        return f"worker {event.worker_id} died: {event.failure.message}"
    if isinstance(event, StopRequested):
        return f"stopping: {event.reason}"
    return None


def row_line(command: RecordRow, measurement: Measurement, board: Board) -> str:
    """A line for a row: how far the run is, what became of the job, where, the figure."""
    where = (
        ", ".join(board.card_name(card) for card in command.attempt.cards[:1])
        if (command.attempt)
        else ""
    )
    if command.attempt and len(command.attempt.cards) > 1:
        where += f" and {len(command.attempt.cards) - 1} more"
    job = command.attempt.job if command.attempt else command.job
    ordinal = f"[{board.done}/{board.total}]" if command.final else "[attempt]"
    words = [ordinal, f"{command.state.value:<13}", job.label]
    if where:
        words.append(f"on {where}")
    words.append(f": {_figure(measurement)}" if measurement.metrics.throughput else "")
    if command.reason and command.state is not State.SUCCEEDED:
        words.append(f": {_shortened(command.reason)}")
    return " ".join(word for word in words if word).replace(" : ", ": ")


def unrun_lines(commands: Sequence[RecordRow], board: Board) -> list[str]:
    """Lines for jobs that ended without running: one for all with the same state and reason,
    since a stop or an unsupported precision can end thousands at once."""
    groups: dict[tuple[State, str], list[RecordRow]] = {}
    for command in commands:
        groups.setdefault((command.state, command.reason), []).append(command)
    lines = []
    for (state, reason), group in groups.items():
        what = group[0].job.label if len(group) == 1 else f"{len(group)} jobs"
        end = f": {_shortened(reason)}" if reason else ""
        lines.append(f"[{board.done}/{board.total}] {state.value:<13} {what}{end}")
    return lines


def render(status: RunStatus) -> RenderableType:
    """The live display: a bar, the counts, and a line for each card that has a worker."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(status.run, style="bold"),
        ProgressBar(total=max(1, status.total), completed=status.done, width=40),
        Text(_times(status)),
    )
    counts = Text()
    for state, count in sorted(status.counts.items()):
        counts.append(f"{count} {state}  ", style=_style(state))
    if status.emulated:
        counts.append("EMULATED CARDS", style="magenta")
    cards = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("card", "phase", "for", "job"):
        cards.add_column(header, no_wrap=True)
    for card in status.cards:
        if card.worker_id:
            style = "" if card.job else "dim"
            words = (card.card, card.phase, duration(card.phase_age_s), card.job)
            # Text, since a plain string would have its [brackets] taken for markup.
            cards.add_row(*(Text(word) for word in words), style=style)
    parts: list[RenderableType] = [bar, counts, cards]
    if status.stopping:
        parts.append(Text(f"stopping: {status.stopping}", style="yellow"))
    return Group(*parts)


def _shortened(reason: str) -> str:
    """A reason on one line; the report and the row have it whole."""
    line = " ".join(reason.split())
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 1] + "…"


def _times(status: RunStatus) -> str:
    left = f", about {duration(status.eta_s)} left" if status.eta_s else ""
    return f"{status.done}/{status.total}  {duration(status.at - status.started_at)}{left}"


def _figure(measurement: Measurement) -> str:
    metrics = measurement.metrics
    text = f"{metrics.throughput:,.1f} {metrics.throughput_unit}"
    if metrics.relative_half_width is not None:
        text += f" ±{100 * metrics.relative_half_width:.1f}%"
    return text


def _emulated_note(emulated: bool, kind: str) -> str:
    return " (emulated)" if emulated and "emulated" not in kind else ""


def _style(state: str) -> str:
    if state in _GOOD:
        return "green"
    return "yellow" if state in _EXPECTED else "red"


# ---------------------------------------------------------------- the two shells


class PlainView:
    """Lines with a time of day, for logs; never a control code."""

    def __init__(self, stream: TextIO, *, interval_s: float = SUMMARY_INTERVAL_S) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._next_summary_at: float | None = None

    def line(self, text: str) -> None:
        """Print one event."""
        clock = time.strftime("%H:%M:%S")
        try:
            print(f"{clock} {_printable(text)}", file=self._stream, flush=True)
        except BrokenPipeError:  # nobody reads any more, which is no reason to stop measuring
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def show(self, status: RunStatus) -> None:
        """Print a summary when the last is old enough."""
        if self._next_summary_at is None:
            self._next_summary_at = status.at + self._interval_s
        if status.at >= self._next_summary_at or status.finished:
            self._next_summary_at = status.at + self._interval_s
            self.line(summary_line(status))

    def close(self) -> None:
        """Nothing to leave behind."""


class TerminalView:
    """Lines scroll above a display that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def line(self, text: str) -> None:
        """Print one event above the display."""
        from rich.text import Text

        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {_printable(text)}"))

    def show(self, status: RunStatus) -> None:
        """Redraw."""
        self._live.update(render(status), refresh=True)

    def close(self) -> None:
        """Remove the display."""
        self._live.stop()


class QuietView:
    """Says nothing (``--quiet``)."""

    def line(self, text: str) -> None:
        """Say nothing."""

    def show(self, status: RunStatus) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to leave behind."""


def open_view(*, quiet: bool = False, stream: TextIO | None = None) -> View:
    """The view that suits where output goes."""
    if quiet:
        return QuietView()
    stream = stream or sys.stdout
    if not stream.isatty():
        return PlainView(stream)
    from rich.console import Console

    return TerminalView(Console(file=stream))


def _printable(text: str) -> str:
    """Text of jobs and errors may hold anything; a log line holds no control characters."""
    return "".join(char if char.isprintable() else " " for char in text)
