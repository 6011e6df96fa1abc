"""Words for terminal, page and Markdown: table cells, verdicts, and a run's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from orchestrator.analysis.metrics import quality_note
from orchestrator.analysis.rankings import (
    HeadToHead,
    Leader,
    Ranking,
    Verdict,
    memory_kind,
    peak_memory_bytes,
)
from orchestrator.analysis.selection import precision_rank
from orchestrator.analysis.summary import STATES, without_rule
from orchestrator.analysis.tables import Table
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.blocks import Cell, Style
from orchestrator.util import format as units
from orchestrator.util.format import one_line
from workloads.util.statistics import samples_needed

if TYPE_CHECKING:
    from orchestrator.analysis.summary import Summary

#: Text for a missing reading: never zero or empty.
NOT_KNOWN = "not known"


_STATE_STYLES: Mapping[State, Style] = {
    State.OUT_OF_MEMORY: "warning",
    State.PRUNED: "quiet",
    State.UNSUPPORTED: "quiet",
    State.FAILED: "bad",
    State.TIMED_OUT: "bad",
    State.LOST: "bad",
    State.NOT_STARTED: "name",
}


def cell(table: Table, line: str, column: str) -> Cell:
    """Return a cell of ``table``: ``1,234``, ``OOM``, empty outside the grid."""
    row = table.cells.get((line, column))
    if row is None:
        return Cell(text="")
    if row.state is not State.SUCCEEDED:
        return Cell(text=STATES[row.state].short, style=_STATE_STYLES.get(row.state, ""))
    searched = not row.batch_size_requested.isdecimal() and row.batch_size is not None
    size = f"b={row.batch_size}" if searched else ""
    note = f"{size} {plus_minus(row)}".strip()
    if quality := quality_note(row):
        note = f"{note}, {quality}" if note else quality
    mark = "*" if row.job_id in table.best else "~" if row.job_id in table.tied else ""
    mark = "!" if row.job_id in table.flagged else mark
    return Cell(text=figure(row), notes=(note,) if note else (), mark=mark)


def plus_minus(row: Measurement) -> str:
    """Format half the confidence interval relative to the throughput: ``±2.1%``."""
    metrics = row.metrics
    if not metrics.throughput or metrics.throughput_low is None or metrics.throughput_high is None:
        return ""
    half = (metrics.throughput_high - metrics.throughput_low) / 2
    return f"±{units.percent(half / metrics.throughput)}"


def figure(row: Measurement) -> str:
    """Format as ``1,234``, or ``(71)`` if no repeat was completed."""
    if row.metrics.repeats or row.metrics.throughput is None:
        return units.number(row.metrics.throughput)
    return f"({units.number(row.metrics.throughput, 2)})"


def standing(ranking: Ranking, name: Callable[[Measurement], str]) -> str:
    """Return whether the fastest row has won, with the names of those that tie."""
    if ranking.verdict is Verdict.TIED:
        return f"tied with {units.listed([name(row) for row in ranking.tied])}: intervals overlap"
    return {
        Verdict.CLEAR_WINNER: "clear winner",
        Verdict.NOT_KNOWN: "no winner: too few repeats for an interval of the first or the second",
        Verdict.ALONE: "nothing to compare with",
    }[ranking.verdict]


def throughput(row: Measurement) -> str:
    """Format as ``1,234 tokens/s ±2.1% within one process``."""
    text = f"{figure(row)} {row.metrics.throughput_unit}".strip()
    half = plus_minus(row)
    return f"{text} {half} {scope(row)}" if half else text


def losses(row: Measurement) -> str:
    """Format first and last loss of the timed steps as ``loss 2.31 → 1.87``; "" if unknown."""
    first, last = row.metrics.loss_first, row.metrics.loss_last
    if first is None or last is None:
        return ""
    return f"loss {units.number(first)} → {units.number(last)}"


def scope(row: Measurement) -> str:
    """Return the processes that a row's interval spans."""
    count = row.metrics.processes
    return "within one process" if count == 1 else f"over {count} processes"


def scopes(table: Table) -> str:
    """Return the processes that the intervals of a table's cells span; "" without any."""
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
    """Format as ``first token 76 ms, then 8.4 ms a token (p99 12 ms)``."""
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
    """Return why there is no 99th percentile; "" if steps were not kept or read."""
    steps = sum(len(sample.step_s) for _, sample in row.samples if not sample.warmup)
    needed = samples_needed(99, row.measure.confidence)
    if not 0 < steps < needed:
        return ""
    return f" (no p99: it needs {needed} steps, and there are {steps})"


def memory(row: Measurement) -> str:
    """Format peak memory with its kind: ``12.3 GiB (device)``."""
    amount = peak_memory_bytes(row)
    return f"{units.size(amount)} ({memory_kind(row)})" if amount is not None else units.MISSING


def energy(row: Measurement | None) -> str:
    """Format work per joule and power of all cards: ``2.130 tokens/J (412 W)``."""
    if row is None or row.metrics.work_per_joule is None:
        return NOT_KNOWN
    work = row.metrics.throughput_unit.partition("/")[0]
    rate, power = units.number(row.metrics.work_per_joule), units.number(row.metrics.power_w, 3)
    return f"{rate} {work}/J ({power} W)"


def leader(one: Leader, chosen: str) -> str:
    """Format the best row by a figure: ``bf16 b=4: 3.204 (tied with 2 more)``."""
    tied = f" (tied with {one.tied} more)" if one.tied else ""
    return f"{chosen}: {units.number(one.value)} {one.metric.unit}".rstrip() + tied


def warm_up(row: Measurement) -> str:
    """Format cost of warm-up: ``12 steps, 4 of 4 shapes met, timing began anew 2 times``."""
    if row.warmup_steps is None:
        return ""
    parts = [units.plural(row.warmup_steps, "step")]
    if row.shapes is not None and row.shapes_unmet is not None:
        parts.append(f"{row.shapes - row.shapes_unmet} of {row.shapes} shapes met")
    if anew := (row.timed_parts or 1) - 1:
        parts.append(f"timing began anew {units.plural(anew, 'time')}")
    if row.timed_compilations:
        parts.append(f"{units.plural(row.timed_compilations, 'graph')} compiled while timed")
    return ", ".join(parts)


def where(row: Measurement) -> str:
    """Format node and cards of a row: ``hpu-1 [0-3]``."""
    if not row.nodes:
        return ""
    cards = sorted(row.card_indices)
    if not cards:
        return ", ".join(dict.fromkeys(row.nodes))
    contiguous = len(cards) > 1 and cards == list(range(cards[0], cards[-1] + 1))
    text = f"{cards[0]}-{cards[-1]}" if contiguous else ",".join(map(str, cards))
    return f"{', '.join(dict.fromkeys(row.nodes))} [{text}]"


# ---------------------------------------------------------------- the answer of a run

MOST_ANSWERS = 3
_REASON_LENGTH = 160


def answers(summary: Summary) -> tuple[str, ...]:
    """Return the sentences, most important first; empty if no row was written."""
    if not summary.rankings:
        return _nothing_ranked(summary) if summary.measured else _nothing_measured(summary)
    sentences = [*filter(None, map(_sides, summary.head_to_head))]
    # Rows without a comparison are no answer if others have one.
    compared = [one for one in summary.rankings if one.verdict is not Verdict.ALONE]
    shown = (compared or summary.rankings)[:MOST_ANSWERS]
    sentences += [_ranking(one, summary) for one in shown]
    more = len(summary.rankings) - len(shown)
    if more > 0:
        sentences.append(f"{units.plural(more, 'more result')} in the table.")
    return tuple(sentences)


def best_text(ranking: Ranking, chosen: str) -> str:
    """Format the fastest setting of a ranking; ``chosen`` is its label."""
    row = ranking.fastest
    rate = f"{figure(row)} {ranking.unit} {plus_minus(row)}".rstrip()
    tied = f" (tied with {len(ranking.tied)} more)" if ranking.tied else ""
    rank = "Best" if ranking.winner else "Fastest"
    return f"{rank} of {row.model}, {ranking.setting.where}: {chosen}, {rate}{tied}"


def place(ranking: Ranking) -> str:
    """Name the device of a ranking: ``Gaudi2``, ``4 × emulated HPU``."""
    setting = ranking.setting
    return f"{setting.cards} × {setting.card}" if setting.cards > 1 else setting.card


def _nothing_ranked(summary: Summary) -> tuple[str, ...]:
    measured = units.plural(summary.measured, "measured job")
    if not summary.flagged:
        return (f"Nothing can be ranked: {measured}, none of them with a throughput.",)
    flags = [f"{len(one.rows):,} {one.flag.name}" for one in summary.flagged]
    why = one_line(summary.flagged[0].rows[0][1], _REASON_LENGTH)
    sentence = f"Nothing can be ranked: of {measured} {len(summary.raised):,} are flagged"
    return (f"{sentence} ({units.listed(flags)}), as in: {why}. --force measures again.",)


def _nothing_measured(summary: Summary) -> tuple[str, ...]:
    if not summary.causes:
        return ()
    cause = summary.causes[0]
    reason = one_line(without_rule(cause), _REASON_LENGTH) or "no reason was recorded"
    jobs = f"{len(cause.rows):,} of {units.plural(len(summary.rows), 'job')}"
    so_far = " so far" if summary.underway else ""
    return (f"Nothing was measured{so_far}. {jobs} {cause.state}: {reason}",)


def _ranking(ranking: Ranking, summary: Summary) -> str:
    best = ranking.fastest
    name = f"{summary.labels[best.job_id].work} {summary.chosen(best)}".strip()
    alike = [one.setting for one in summary.rankings]
    place_words = [
        getattr(ranking.setting, name)
        for name in ("model", "dataset")
        if len({getattr(one, name) for one in alike}) > 1
    ]
    model = f"{', '.join(place_words)}: " if place_words else ""
    figure = f"{units.number(best.metrics.throughput)} {ranking.unit}"
    where = f"on {place(ranking)}"
    if ranking.verdict is Verdict.ALONE:
        return f"{model}{name} reaches {figure} {where}; nothing to compare with."
    if ranking.verdict is Verdict.NOT_KNOWN:
        return f"{model}{name} was fastest {where} ({figure}), with too few repeats to be sure."
    remarks = [*_margin(ranking, summary)]
    if ranking.tied:
        names = [summary.chosen(row) for row in ranking.tied]
        remarks.append(f"tied with {units.listed(names, 3)}")
    rest = f": {', '.join(remarks)}" if remarks else ""
    return f"{model}{name} is fastest {where} at {figure}{rest}."


def _margin(ranking: Ranking, summary: Summary) -> Iterator[str]:
    """Yield the speed-up over the widest precision's best, else over the fastest row not tied."""
    best = ranking.fastest
    widest = min((row.precision for row in ranking.ranked), key=precision_rank)
    tied = {row.job_id for row in ranking.tied}
    beaten = [row for row in ranking.ranked[1:] if row.job_id not in tied]
    plain = next((row for row in beaten if row.precision == widest), None)
    if plain is not None and best.precision != widest:
        yield f"{_times(best, plain)} {widest}"
    elif beaten:
        next_one = "the next that is slower" if tied else "the next"
        yield f"{_times(best, beaten[0])} {next_one} ({summary.chosen(beaten[0])})"


def _times(row: Measurement, other: Measurement) -> str:
    return units.times((row.metrics.throughput or 0.0) / (other.metrics.throughput or 1.0))


def _sides(one: HeadToHead) -> str:
    """Format as ``NVIDIA H200 is 1.42× Gaudi2 at equal settings (1.38× to 1.46×, 12 settings)``."""
    settings = units.plural(len(one.lines) + one.left_out, "setting")
    side = one.fastest
    if side is None:
        return f"{', '.join(one.sides[:-1])} and {one.sides[-1]} are tied at equal settings."
    known = [(ratio, name) for ratio, name in zip(one.overall, one.sides, strict=True) if ratio]
    ratio, name = max(known, key=lambda pair: pair[0].value)
    value, low, high, other = ratio.value, ratio.low, ratio.high, one.sides[0]
    if side == 0:
        other = name
        value, low, high = 1 / value, *(None if v is None else 1 / v for v in (high, low))
    ends = [] if low is None else [units.times(low), units.times(high)]
    span = f"{ends[0]} to {ends[1]}, " if len(set(ends)) > 1 else ""
    sentence = f"{one.sides[side]} is {units.times(value)} {other} at equal settings"
    return f"{sentence} ({span}{settings})."
