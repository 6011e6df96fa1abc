"""The answer of a run in a sentence or two: which setting is fastest, by how much, and how sure.

It is what one wants to know first in the morning, so page and terminal begin or end with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrator.analysis.rankings import Contest, HeadToHead, Verdict
from orchestrator.analysis.selection import card_name, precision_rank
from orchestrator.analysis.summary import without_rule
from orchestrator.core.measurement import Measurement
from orchestrator.report import cells
from orchestrator.util import format as units
from orchestrator.util.format import one_line

if TYPE_CHECKING:
    from orchestrator.analysis.summary import Summary

#: Sentences; the tables have all contests.
MOST_ANSWERS = 3
_REASON_LENGTH = 160


def answers(summary: Summary) -> tuple[str, ...]:
    """The sentences, the most important first; empty where no row was written."""
    if not summary.contests:
        return _nothing_ranked(summary) if summary.measured else _nothing_measured(summary)
    told = [*filter(None, map(_sides, summary.head_to_head))]
    # A row that nothing was compared with is no answer where others are.
    held = [one for one in summary.contests if one.verdict is not Verdict.ALONE]
    shown = (held or summary.contests)[:MOST_ANSWERS]
    told += [_contest(one, summary) for one in shown]
    more = len(summary.contests) - len(shown)
    if more > 0:
        told.append(f"{units.plural(more, 'more result')} in the table.")
    return tuple(told)


def best_text(contest: Contest, chosen: str) -> str:
    """The fastest setting of a contest in one line; ``chosen`` is its label."""
    row = contest.fastest
    figure = f"{cells.figure(row)} {contest.unit} {cells.plus_minus(row)}".rstrip()
    tied = f" (tied with {len(contest.tied)} more)" if contest.tied else ""
    rank = "Best" if contest.winner else "Fastest"
    return f"{rank} of {row.model}, {contest.setting.where}: {chosen}, {figure}{tied}"


def place(contest: Contest) -> str:
    """The device of a contest in a word or two: ``Gaudi2``, ``4 × emulated HPU``."""
    setting = contest.setting
    name = card_name(setting.accelerator, setting.device, emulated=setting.emulated)
    cards = f"{setting.cards} × " if setting.cards > 1 else ""
    return f"{cards}{name}"


def _nothing_ranked(summary: Summary) -> tuple[str, ...]:
    measured = units.plural(summary.measured, "measured job")
    if not summary.flagged:
        return (f"Nothing can be ranked: {measured}, none of them with a throughput.",)
    flags = [f"{len(one.rows):,} {one.flag.name}" for one in summary.flagged]
    why = one_line(summary.flagged[0].rows[0][1], _REASON_LENGTH)
    told = f"Nothing can be ranked: of {measured} {len(summary.raised):,} are flagged"
    return (f"{told} ({units.listed(flags)}), as in: {why}. --force measures again.",)


def _nothing_measured(summary: Summary) -> tuple[str, ...]:
    if not summary.causes:
        return ()
    cause = summary.causes[0]
    reason = one_line(without_rule(cause), _REASON_LENGTH) or "no reason was recorded"
    jobs = f"{len(cause.rows):,} of {units.plural(len(summary.rows), 'job')}"
    so_far = " so far" if summary.underway else ""
    return (f"Nothing was measured{so_far}. {jobs} {cause.state}: {reason}",)


def _contest(contest: Contest, summary: Summary) -> str:
    best = contest.fastest
    name = f"{summary.labels[best.job_id].work} {summary.chosen(best)}".strip()
    alike = [one.setting for one in summary.contests]
    place_words = [
        getattr(contest.setting, name)
        for name in ("model", "dataset")
        if len({getattr(one, name) for one in alike}) > 1
    ]
    model = f"{', '.join(place_words)}: " if place_words else ""
    figure = f"{units.number(best.metrics.throughput)} {contest.unit}"
    where = f"on {place(contest)}"
    if contest.verdict is Verdict.ALONE:
        return f"{model}{name} reaches {figure} {where}; nothing to compare with."
    if contest.verdict is Verdict.NOT_KNOWN:
        return f"{model}{name} was fastest {where} ({figure}), with too few repeats to be sure."
    told = [*_margin(contest, summary)]
    if contest.tied:
        told.append(f"tied with {units.listed([summary.chosen(row) for row in contest.tied], 3)}")
    rest = f": {', '.join(told)}" if told else ""
    return f"{model}{name} is fastest {where} at {figure}{rest}."


def _margin(contest: Contest, summary: Summary) -> Iterator[str]:
    """Times as fast as the widest precision at its best, else as the fastest row that it
    does not tie with."""
    best = contest.fastest
    widest = min((row.precision for row in contest.ranked), key=precision_rank)
    tied = {row.job_id for row in contest.tied}
    beaten = [row for row in contest.ranked[1:] if row.job_id not in tied]
    plain = next((row for row in beaten if row.precision == widest), None)
    if plain is not None and best.precision != widest:
        yield f"{_times(best, plain)} {widest}"
    elif beaten:
        next_one = "the next that is slower" if tied else "the next"
        yield f"{_times(best, beaten[0])} {next_one} ({summary.chosen(beaten[0])})"


def _times(row: Measurement, other: Measurement) -> str:
    return units.times((row.metrics.throughput or 0.0) / (other.metrics.throughput or 1.0))


def _sides(one: HeadToHead) -> str:
    """``NVIDIA H200 is 1.42× Gaudi2 at equal settings (1.38× to 1.46×, 12 settings)``."""
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
    told = f"{one.sides[side]} is {units.times(value)} {other} at equal settings"
    return f"{told} ({span}{settings})."
