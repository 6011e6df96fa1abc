"""A run's progress in words: one line an event, one a row, one for the whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.events import (
    ClockSet,
    Event,
    NodeJoined,
    NodeLeft,
    RecordRow,
    StopRequested,
    WorkerStopped,
)
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.driver.board import Board
from orchestrator.runtime.status import RunStatus

REASON_LENGTH = 160
#: After so many requests to stop: what happens, what another one does, and how to go on.
_NEXT_STOP = {
    1: "; running jobs end first and no more start. A second one stops them, too, each with its "
    "row. The same command resumes the run",
    2: "; running jobs are stopped, each with its row. A third one ends at once. The same command "
    "resumes the run",
}


def duration(seconds: float) -> str:
    """``42s``, ``3m05s``, ``2h07m``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def left_text(middle_s: float, low_s: float | None, high_s: float | None) -> str:
    """``about 3m05s``, or ``1m10s to 12m40s`` or ``up to 12m40s`` while little is known."""
    if low_s is None or high_s is None:
        return f"about {duration(middle_s)}"
    return f"{duration(low_s)} to {duration(high_s)}" if low_s >= 1 else f"up to {duration(high_s)}"


def summary_line(status: RunStatus) -> str:
    """Counts, cards, time: one line."""
    parts = [f"{status.done}/{status.total} jobs"]
    parts += [f"{count} {state}" for state, count in sorted(status.counts.items()) if count]
    emulated = " emulated" if status.emulated else ""
    if status.cards:  # while a run waits it has none
        parts.append(f"{status.assigned}/{len(status.cards)}{emulated} cards assigned")
    # Phases in which a card computes nothing: its worker starts, or waits for its host's processor.
    for phase, told in (("starting", "starting"), ("queued", "waiting for the processor")):
        count = sum(card.phase == phase for card in status.cards)
        parts += [f"{count} {told}"] if count else []
    parts += rate_texts(status)
    parts.append(f"{duration(status.elapsed_s)} so far")
    if status.eta_s and not status.finished:
        parts.append(f"{left_text(status.eta_s, status.eta_low_s, status.eta_high_s)} left")
    if status.paused:
        parts.append(f"PAUSED: {status.paused}")
    if status.waiting:
        parts.append(f"WAITING: {status.waiting}")
    if status.slow_cards:
        cards = (
            "1 slow card" if len(status.slow_cards) == 1 else f"{len(status.slow_cards)} slow cards"
        )
        parts.append(cards)
    if status.trouble:
        parts.append(f"TROUBLE: {status.trouble}")
    if status.stopping:
        parts.append(f"stopping: {status.stopping}")
    if status.driver_died:
        parts.append("NO DRIVER: it died; the same `nightgrid run` resumes it")
    return " | ".join(parts)


def rate_texts(status: RunStatus) -> list[str]:
    """``1,204 tokens/s (12 jobs)`` for each unit, and the jobs by the hour; empty at first."""
    texts = []
    for rate in status.rates:
        jobs = "1 job" if rate.jobs == 1 else f"{rate.jobs} jobs"
        texts.append(f"{_three_digits(rate.per_s)} {rate.unit} ({jobs})")
    if status.jobs_per_h is not None:
        texts.append(f"{_three_digits(status.jobs_per_h)} jobs/h")
    return texts


def event_line(event: Event, board: Board) -> str | None:
    """A line for an event that people want to know of; None for the others."""
    if isinstance(event, NodeJoined):
        node = event.node
        kind = node.device_name or node.accelerator.value
        count = len(node.card_indices)
        cards = f"{count} {node.accelerator} card{'' if count == 1 else 's'}"
        return f"node {node.name}: {cards}, {kind}{_emulated_note(node.emulated, kind)}"
    if isinstance(event, NodeLeft):
        return f"LOST node {board.node_name(event.node_id)}: {event.reason}"
    if isinstance(event, WorkerStopped) and event.failure is not None:
        return f"worker {event.worker_id} died: {event.failure.message}"
    if isinstance(event, StopRequested):
        return f"stopping: {event.reason}{_NEXT_STOP.get(board.stop_requests, '')}"
    if isinstance(event, ClockSet) and event.by_s:
        sign = "forward" if event.by_s > 0 else "back"
        return f"this machine's clock was set {sign} by {duration(abs(event.by_s))}"
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
    words = [ordinal, f"{command.state.value:<13}", board.label(job)]
    if where:
        words.append(f"on {where}")
    words.append(f": {_figure(measurement)}" if measurement.metrics.throughput else "")
    if measurement.reason and command.state is not State.SUCCEEDED:
        words.append(f": {shortened(measurement.reason)}")
    return " ".join(word for word in words if word).replace(" : ", ": ")


def unrun_lines(commands: Sequence[RecordRow], board: Board) -> list[str]:
    """Lines for jobs that ended without running: one for all with the same state and reason,
    since a stop or an unsupported precision can end thousands at once."""
    groups: dict[tuple[State, str], list[RecordRow]] = {}
    for command in commands:
        groups.setdefault((command.state, command.reason), []).append(command)
    lines = []
    for (state, reason), group in groups.items():
        what = board.label(group[0].job) if len(group) == 1 else f"{len(group)} jobs"
        end = f": {shortened(reason)}" if reason else ""
        lines.append(f"[{board.done}/{board.total}] {state.value:<13} {what}{end}")
    return lines


def shortened(reason: str) -> str:
    """A reason on one line; the report and the row have it whole."""
    line = " ".join(reason.split())
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 1] + "…"


def _figure(measurement: Measurement) -> str:
    metrics = measurement.metrics
    text = f"{metrics.throughput:,.1f} {metrics.throughput_unit}"
    if metrics.relative_half_width is not None:
        text += f" ±{100 * metrics.relative_half_width:.1f}%"
    return text


def _three_digits(value: float) -> str:
    """``1,204``, ``31.5``, ``0.84``: figures of progress, not of a result."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _emulated_note(emulated: bool, kind: str) -> str:
    return " (emulated)" if emulated and "emulated" not in kind else ""


def printable(text: str) -> str:
    """Text of jobs and errors may hold anything; a log line holds no control characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in text)
