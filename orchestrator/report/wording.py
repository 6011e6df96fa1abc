"""Words for terminal, page and Markdown: table cells, verdicts, and a run's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.analysis.flags import LASTING
from orchestrator.analysis.metrics import (
    memory_is_known,
    memory_kind,
    peak_memory_bytes,
    quality_note,
)
from orchestrator.analysis.rankings import HeadToHead, Leader, Ranking, Verdict
from orchestrator.analysis.ratio import Ratio
from orchestrator.analysis.selection import precision_rank
from orchestrator.analysis.summary import STATES, Summary, without_rule
from orchestrator.analysis.tables import Table
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.blocks import Cell, Style
from orchestrator.util import format as units
from orchestrator.util.format import one_line
from workloads.util.statistics import samples_needed

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
    if (one := table.predicted.get(row.job_id)) is not None:
        about = f"±{units.percent(one.plus_minus)} predicted"
        return Cell(text=units.number(one.value), notes=(about,), style="quiet")
    if row.state is not State.SUCCEEDED:
        return Cell(text=STATES[row.state].short, style=_STATE_STYLES.get(row.state, ""))
    searched = not row.batch_size_requested.isdecimal() and row.batch_size is not None
    size = f"b={row.batch_size}" if searched else ""
    wrong = "loss did not fall" if "loss_flag" in row.details else ""
    parts = (f"{size} {plus_minus(row)}".strip(), quality_note(row), wrong)
    note = ", ".join(filter(None, parts))
    mark = "*" if row.job_id in table.best else "~" if row.job_id in table.tied else ""
    mark = "!" if row.job_id in table.flagged else mark
    text = figure(row, at_least=row.job_id in table.bounds)
    return Cell(text=text, notes=(note,) if note else (), mark=mark)


def plus_minus(row: Measurement) -> str:
    """Format half the confidence interval relative to the throughput: ``±2.1%``."""
    metrics = row.metrics
    if not metrics.throughput or metrics.throughput_low is None or metrics.throughput_high is None:
        return ""
    half = (metrics.throughput_high - metrics.throughput_low) / 2
    return f"±{units.percent(half / metrics.throughput)}"


def figure(row: Measurement, *, at_least: bool = False) -> str:
    """Format as ``1,234``, ``≥ 1,234`` for a lower bound, ``(71)`` without a complete repeat."""
    bound = "≥ " if at_least else ""
    if row.metrics.repeats or row.metrics.throughput is None:
        return f"{bound}{units.number(row.metrics.throughput)}"
    return f"({bound}{units.number(row.metrics.throughput, 2)})"


def ratio(ratio: Ratio, *, tie: bool = False) -> str:
    """Format as ``1.52× (1.40× to 1.65×)``, ``at least 1.52× (…)``; a ``~`` marks a tie."""
    value = f"{ratio.side} {units.times(ratio.value)}".lstrip()
    if ratio.low is None:
        return value
    mark = " ~" if tie and not ratio.decided else ""
    return f"{value} ({units.times(ratio.low)} to {units.times(ratio.high)}){mark}"


def standing(ranking: Ranking, name: Callable[[Measurement], str]) -> str:
    """Return whether the fastest row has won, and what would settle it if not."""
    if ranking.verdict is Verdict.CLEAR_WINNER:
        return "clear winner"
    if ranking.verdict is Verdict.ALONE:
        return "nothing to compare with"
    return f"provisional best: {open_question(ranking, name)}"


def open_question(ranking: Ranking, name: Callable[[Measurement], str]) -> str:
    """Return why the fastest row has not won yet, and what would settle it."""
    best, rivals = ranking.fastest, ranking.tied
    if again := ranking.to_measure_again:
        others = units.listed([name(row) for row in again if row is not best])
        jobs = "this job" if len(again) == 1 else f"these {len(again):,} jobs"
        if others:
            why = f"{others} shared the processors with other processes and may be faster"
        else:
            names = units.listed([name(row) for row in rivals])
            why = f"it shared the processors with other processes, and {names} may be as fast"
        command = f"nightgrid run --resume --run {best.run} --retry-flagged"
        return f"{why}; to settle it, measure {jobs} again: {command}"
    if ranking.verdict is Verdict.NOT_KNOWN:
        single = [row for row in (best, *rivals) if row.metrics.throughput_low is None]
        unknown = units.listed(["it" if row is best else name(row) for row in single], 3)
        others = units.listed([name(row) for row in rivals], 3)
        may = f"{others} may be as fast, with " if rivals else ""
        few = f"{may}too few repeats for an interval of {unknown}"
        return f"{few}; min_repeats: 2 or more may settle it"
    names = units.listed([name(row) for row in rivals])
    those = "those" if len(rivals) > 1 else "that"
    more = "more repeats (max_repeats) or replicates may settle it"
    return f"its interval overlaps {those} of {names}; {more}"


def throughput(row: Measurement, *, at_least: bool = False) -> str:
    """Format as ``1,234 tokens/s ±2.1% within one process``."""
    text = f"{figure(row)} {row.metrics.throughput_unit}".strip()
    text = f"at least {text}" if at_least else text
    count, half = row.metrics.processes, plus_minus(row)
    scope = "within one process" if count == 1 else f"over {count} processes"
    return f"{text} {half} {scope}" if half else text


def losses(row: Measurement) -> str:
    """Format first and last loss of the timed steps as ``loss 2.31 → 1.87``; "" if unknown."""
    first, last = row.metrics.loss_first, row.metrics.loss_last
    if first is None or last is None:
        return ""
    wrong = f" ({row.details['loss_flag']})" if "loss_flag" in row.details else ""
    return f"loss {units.number(first)} → {units.number(last)}{wrong}"


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
    """Format as ``first token 76 ms, then 8.4 ms a token (p99 12 ms)``, or say why there is no 99th
    percentile, where steps were kept and read."""
    metrics = row.metrics
    words = [] if metrics.ttft_s is None else [f"first token {units.seconds(metrics.ttft_s)}"]
    if metrics.tpot_p50_s is not None:
        steps = sum(len(sample.step_s) for _, sample in row.samples if not sample.warmup)
        needed, slowest = samples_needed(99, row.measure.confidence), ""
        if metrics.tpot_p99_s:
            slowest = f" (p99 {units.seconds(metrics.tpot_p99_s)})"
        elif 0 < steps < needed:
            slowest = f" (no p99: it needs {needed} steps, and there are {steps})"
        words.append(f"then {units.seconds(metrics.tpot_p50_s)} a token{slowest}")
    return ", ".join(words)


def memory(row: Measurement) -> str:
    """Format peak memory with its kind: ``12.3 GiB (device)``."""
    amount = peak_memory_bytes(row)
    if amount is None:
        return units.MISSING
    kind = memory_kind(row) if memory_is_known(row) else "growth of a warm process, no peak"
    return f"{units.size(amount)} ({kind})"


def energy(row: Measurement | None) -> str:
    """Format work per joule and power of all cards: ``2.130 tokens/J (412 W)``."""
    if row is None or row.metrics.work_per_joule is None:
        return NOT_KNOWN
    work = row.metrics.throughput_unit.partition("/")[0]
    rate, power = units.number(row.metrics.work_per_joule), units.number(row.metrics.power_w, 3)
    return f"{rate} {work}/J ({power} W)"


def latency(ranking: Ranking, row: Measurement) -> str:
    """Format the median latency of a prompt: ``3.50 s``, ``at most 3.50 s``."""
    text = units.seconds(row.metrics.latency_p50_s)
    return f"{'at most ' * ranking.at_least(row)}{text}"


def provisional(ranking: Ranking, *rows: Measurement) -> str:
    """Return ``, provisional`` if one of these rows was measured under contention."""
    return ", provisional" if any(map(ranking.at_least, rows)) else ""


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
    nodes, cards = ", ".join(dict.fromkeys(row.nodes)), sorted(row.card_indices)
    if not cards:
        return nodes
    contiguous = len(cards) > 1 and cards == list(range(cards[0], cards[-1] + 1))
    text = f"{cards[0]}-{cards[-1]}" if contiguous else ",".join(map(str, cards))
    return f"{nodes} [{text}]"


# ---------------------------------------------------------------- the answer of a run

MOST_ANSWERS = 3
_REASON_LENGTH = 160


def answers(summary: Summary) -> tuple[str, ...]:
    """Return the sentences, most important first; empty if no row was written."""
    if summary.answers:
        return tuple(f"{one.question}: {one.sentence}." for one in summary.answers)
    if not summary.rankings:
        return tuple(_nothing(summary))
    sentences = [*filter(None, map(_sides, summary.head_to_head))]
    # Rows without a comparison are no answer if others have one.
    compared = [one for one in summary.rankings if one.verdict is not Verdict.ALONE]
    shown = (compared or summary.rankings)[:MOST_ANSWERS]
    sentences += [_ranking(one, summary) for one in shown]
    more = len(summary.rankings) - len(shown)
    if more > 0:
        sentences.append(f"{units.plural(more, 'more result')} in the table.")
    return tuple(sentences)


#: Settings of which each may be the fastest that are named.
MOST_CONTENDERS = 3


def contenders(ranking: Ranking, name: Callable[[Measurement], str]) -> str:
    """Name the fastest setting with all that may be as fast: ``A or B``, ``A or one of 5 others``.
    The first alone would be an answer that a quieter machine contradicts."""
    names = [name(row) for row in ranking.first] or [name(ranking.fastest)]
    if len(names) > MOST_CONTENDERS:
        return f"{names[0]} or one of {len(names) - 1:,} others"
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _nothing(summary: Summary) -> Iterator[str]:
    """Yield why nothing is ranked, if there are rows."""
    measured = units.plural(summary.measured, "measured job")
    if summary.flagged:
        flags = units.listed([f"{len(one.rows):,} {one.flag.name}" for one in summary.flagged])
        why = one_line(summary.flagged[0].rows[0][1], _REASON_LENGTH)
        every = [{one.flag.name for one in raised} for raised in summary.raised.values()]
        again = sum(map(LASTING.isdisjoint, every))
        which = "them" if again == len(every) else f"{again:,} of them"
        end = f" --retry-flagged measures {which} again." if again else ""
        yield (
            f"Nothing can be ranked: of {measured} {len(every):,} are flagged ({flags}), "
            f"as in: {why}.{end}"
        )
    elif summary.measured:
        yield f"Nothing can be ranked: {measured}, none of them with a throughput."
    elif summary.causes:
        cause = summary.causes[0]
        reason = one_line(without_rule(cause), _REASON_LENGTH) or "no reason was recorded"
        jobs = f"{len(cause.rows):,} of {units.plural(len(summary.rows), 'job')}"
        so_far = " so far" if summary.underway else ""
        yield f"Nothing was measured{so_far}. {jobs} {cause.state}: {reason}"


def _ranking(ranking: Ranking, summary: Summary) -> str:
    best = ranking.fastest
    name = f"{summary.work(best)} {contenders(ranking, summary.chosen)}".strip()
    alike = [one.setting for one in summary.rankings]
    place_words = [
        getattr(ranking.setting, name)
        for name in ("workload", "model", "dataset")
        if len({getattr(one, name) for one in alike}) > 1
    ]
    model = f"{', '.join(place_words)}: " if place_words else ""
    figure = f"{units.number(best.metrics.throughput)} {ranking.unit}"
    bound, setting = ranking.at_least(best), ranking.setting
    where = f"on {f'{setting.cards} × ' if setting.cards > 1 else ''}{setting.card}"
    if ranking.verdict is Verdict.ALONE:
        reach = f"at least {figure}" if bound else figure
        return f"{model}{name} reaches {reach} {where}; nothing to compare with."
    reach = f"with at least {figure}" if bound else f"at {figure}"
    margins = list(_margin(ranking, summary))
    if ranking.winner is not None:
        return f"{model}{name} is fastest {where} {': '.join([reach, *margins])}."
    why = open_question(ranking, summary.chosen)
    if ranking.tied:
        where, reach = f"{where},", f"the first {reach}"
    return f"{model}{name} is the provisional best {where} {', '.join([reach, *margins])}: {why}."


def _margin(ranking: Ranking, summary: Summary) -> Iterator[str]:
    """Yield the speed-up over the widest precision's best, else over the fastest slower row."""
    best = ranking.fastest
    widest = min((row.precision for row in ranking.ranked), key=precision_rank)
    rivals = {row.job_id for row in ranking.tied}
    beaten = [row for row in ranking.ranked[1:] if row.job_id not in rivals]
    plain = next((row for row in ranking.ranked if row.precision == widest), best)
    if plain is not best and plain.job_id not in rivals:
        # Another batch size or setting is no effect of the precision: the base is named.
        alike = replace(summary.labels[plain.job_id], precision=best.precision)
        own = replace(summary.labels[best.job_id], precision=best.precision)
        other, name = plain, widest if alike == own else f"the best {summary.chosen(plain)}"
    elif beaten:
        next_one = "the next that is slower" if rivals else "the next"
        other, name = beaten[0], f"{next_one} ({summary.chosen(beaten[0])})"
    else:
        return
    if not ranking.at_least(other):  # else it may be nearly as fast
        bound = "at least " if ranking.at_least(best) else ""
        factor = (best.metrics.throughput or 0.0) / (other.metrics.throughput or 1.0)
        yield f"{bound}{units.times(factor)} {name}"


def _sides(one: HeadToHead) -> str:
    """Format as ``NVIDIA H200 is 1.42× Gaudi2 at equal settings (1.38× to 1.46×, 12 settings)``;
    "" if the first side has no setting in common with another."""
    known = [(ratio, place) for place, ratio in enumerate(one.overall) if ratio is not None]
    if not known:
        return ""
    side = one.fastest
    if side is None:
        return _no_order([one.sides[0], *(one.sides[place] for _, place in known)], known)
    ratio, other = max(known, key=lambda pair: pair[0].value)
    settings = units.plural(len(one.over_first(other)), "setting")
    value, low, high = ratio.value, ratio.low, ratio.high
    if side == 0:
        value, low, high = 1 / value, *(None if v is None else 1 / v for v in (high, low))
    else:
        other = 0
    ends = [] if low is None else [units.times(low), units.times(high)]
    span = f"{ends[0]} to {ends[1]}, " if len(set(ends)) > 1 else ""
    bound = "at least " if ratio.side else ""
    name = f"{one.sides[side]} is {bound}{units.times(value)} {one.sides[other]}"
    return f"{name} at equal settings ({span}{settings})."


def _no_order(sides: Sequence[str], known: Sequence[tuple[Ratio, int]]) -> str:
    """Return why no side is the fastest."""
    names, ratios = f"{', '.join(sides[:-1])} and {sides[-1]}", [ratio for ratio, _ in known]
    why = ""
    if any(ratio.side for ratio in ratios):
        why = "rows shared the processors with other processes; --retry-flagged measures them again"
    elif any(ratio.low is None for ratio in ratios):
        why = "too few repeats for an interval; min_repeats: 2 or more may settle it"
    if why:
        return f"{names} have no order yet at equal settings: {why}."
    if any(ratio.decided for ratio in ratios):
        return f"None of {names} is ahead of all others at equal settings."
    return f"{names} are tied at equal settings."
