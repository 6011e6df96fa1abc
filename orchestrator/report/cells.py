"""Text of a table's cell: the same words in the terminal, the page and the Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.analysis.metrics import quality_note
from orchestrator.analysis.rankings import Contest, Leader, Verdict, memory_kind, peak_memory_bytes
from orchestrator.analysis.summary import SHORT_STATE
from orchestrator.analysis.tables import BATCH, Table
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.util import format as units
from workloads.confidence import samples_needed

#: Text where there is no reading: never zero, and never an empty cell.
NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellText:
    """One cell. ``mark`` is ``*`` for the best, ``~`` for each of those that share the first place,
    ``!`` for one that is flagged."""

    #: "1,234", "OOM", "" where the grid asked for nothing; "(71)" where no repeat was completed.
    value: str
    note: str = ""  # "±2.1%", with the batch size that was found where `max` was asked
    mark: str = ""
    state: State | None = None


def cell_text(table: Table, line: str, column: str) -> CellText:
    """The text of one cell of ``table``."""
    row = table.cells.get((line, column))
    if row is None:
        return CellText(value="")
    if row.state is not State.SUCCEEDED:
        return CellText(value=SHORT_STATE[row.state], state=row.state)
    mark = _mark(row, table)
    note = plus_minus(row)
    if not row.batch_size_requested.isdecimal() and row.batch_size is not None:
        note = f"b={row.batch_size}" + (f" {note}" if note else "")
    if quality := quality_note(row):
        note = f"{note}, {quality}" if note else quality
    value = figure(row)
    return CellText(value=value, note=note, mark=mark, state=row.state)


def _mark(row: Measurement, table: Table) -> str:
    if row.job_id in table.flagged:
        return "!"
    return "*" if row.job_id in table.best else "~" if row.job_id in table.tied else ""


def plus_minus(row: Measurement) -> str:
    """Half the confidence interval, relative to the throughput: ``±2.1%``."""
    metrics = row.metrics
    if not metrics.throughput or metrics.throughput_low is None or metrics.throughput_high is None:
        return ""
    half = (metrics.throughput_high - metrics.throughput_low) / 2
    return f"±{units.percent(half / metrics.throughput)}"


def figure(row: Measurement) -> str:
    """``1,234``; ``(71)`` where no repeat was completed: a rate of whatever was done."""
    if row.metrics.repeats or row.metrics.throughput is None:
        return units.number(row.metrics.throughput)
    return f"({units.number(row.metrics.throughput, 2)})"


def standing(contest: Contest, name: Callable[[Measurement], str]) -> str:
    """Say whether the fastest row of a contest has won, with the names of those that tie."""
    if contest.verdict is Verdict.TIED:
        return f"tied with {units.listed([name(row) for row in contest.tied])}: intervals overlap"
    return {
        Verdict.CLEAR_WINNER: "clear winner",
        Verdict.NOT_KNOWN: "no winner: too few repeats for an interval of the first or the second",
        Verdict.ALONE: "nothing to compare with",
    }[contest.verdict]


def throughput(row: Measurement) -> str:
    """``1,234 tokens/s ±2.1% within one process``."""
    text = f"{figure(row)} {row.metrics.throughput_unit}".strip()
    half = plus_minus(row)
    return f"{text} {half} {scope(row)}" if half else text


def column_title(table: Table, column: str) -> str:
    """The head of a column, where nothing above it says what it is: ``b=8``."""
    return f"b={column}" if table.column_name == BATCH else column


def losses(row: Measurement) -> str:
    """``loss 2.31 → 1.87``, the first and the last of the timed steps; "" where none was kept."""
    first, last = row.metrics.loss_first, row.metrics.loss_last
    if first is None or last is None:
        return ""
    return f"loss {units.number(first)} → {units.number(last)}"


def scope(row: Measurement) -> str:
    """The processes that the interval of a row spans."""
    count = row.metrics.processes
    return "within one process" if count == 1 else f"over {count} processes"


def scopes(table: Table) -> str:
    """The processes that the intervals of a table's cells span, in one line; "" without any."""
    spans = [row.metrics.processes for row in table.cells.values() if plus_minus(row)]
    if not spans:
        return ""
    several = sorted({count for count in spans if count > 1})
    if not several:
        return "± is the interval within one process"
    most = f"{several[0]} to {several[-1]}" if len(several) > 1 else f"{several[0]}"
    alone = spans.count(1)
    rest = f"; of {units.plural(alone, 'cell')} within one process" if alone else ""
    return f"± is the interval over {most} processes{rest}"


def token_times(row: Measurement) -> str:
    """``first token 76 ms, then 8.4 ms a token (p99 12 ms)``."""
    metrics = row.metrics
    words = []
    if metrics.ttft_s is not None:
        words.append(f"first token {units.seconds(metrics.ttft_s)}")
    if metrics.tpot_p50_s is not None:
        slowest = f" (p99 {units.seconds(metrics.tpot_p99_s)})" if metrics.tpot_p99_s else ""
        slowest = slowest or _why_no_p99(row)
        words.append(f"then {units.seconds(metrics.tpot_p50_s)} a token{slowest}")
    return ", ".join(words)


def _why_no_p99(row: Measurement) -> str:
    """The reason for no 99th percentile; "" where the steps were not kept or not read."""
    steps = sum(len(sample.step_s) for _, sample in row.samples if not sample.warmup)
    needed = samples_needed(99, row.measure.confidence)
    if not 0 < steps < needed:
        return ""
    return f" (no p99: it needs {needed} steps, and there are {steps})"


def memory(row: Measurement) -> str:
    """Peak memory with whose it is: ``12.3 GiB (device)``."""
    amount = peak_memory_bytes(row)
    return f"{units.size(amount)} ({memory_kind(row)})" if amount is not None else units.MISSING


def energy(row: Measurement | None) -> str:
    """Work per joule, and the power of all its cards: ``2.130 tokens/J (412 W)``."""
    if row is None or row.metrics.work_per_joule is None:
        return NOT_KNOWN
    work = row.metrics.throughput_unit.partition("/")[0]
    rate, power = units.number(row.metrics.work_per_joule), units.number(row.metrics.power_w, 3)
    return f"{rate} {work}/J ({power} W)"


def leader(one: Leader, chosen: str) -> str:
    """Best row by a figure: ``bf16 b=4: 3.204 (tied with 2 more)``."""
    tied = f" (tied with {one.tied} more)" if one.tied else ""
    return f"{chosen}: {units.number(one.value)} {one.metric.unit}".rstrip() + tied


def warm_up(row: Measurement) -> str:
    """Cost of warm-up and what it met: ``12 steps, 4 of 4 shapes, timed anew 1 time``."""
    if row.warmup_steps is None:
        return ""
    parts = [f"{row.warmup_steps} steps"]
    if row.shapes is not None and row.shapes_unmet is not None:
        parts.append(f"{row.shapes - row.shapes_unmet} of {row.shapes} shapes met")
    if anew := (row.timed_parts or 1) - 1:
        parts.append(f"timing began anew {anew} times")
    if row.timed_compilations:
        parts.append(f"{row.timed_compilations} graphs compiled while timed")
    return ", ".join(parts)


def where(row: Measurement) -> str:
    """Node and cards of a row: ``hpu-1 [0-3]``."""
    if not row.nodes:
        return ""
    cards = sorted(row.card_indices)
    if not cards:
        return ", ".join(dict.fromkeys(row.nodes))
    contiguous = len(cards) > 1 and cards == list(range(cards[0], cards[-1] + 1))
    text = f"{cards[0]}-{cards[-1]}" if contiguous else ",".join(map(str, cards))
    return f"{', '.join(dict.fromkeys(row.nodes))} [{text}]"
