"""A comparison of two runs as text for a terminal, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.analysis.comparison import Change, Refused, RunComparison, Turned
from orchestrator.analysis.metrics import figure_changes
from orchestrator.core.labels import Label, labels_of
from orchestrator.core.measurement import Measurement
from orchestrator.util import format as units
from orchestrator.util.format import finite, one_line, visible

MOST_LINES = 40


def print_comparison(comparison: RunComparison, console: Console, *, every: bool = False) -> None:
    """Significant changes first; then what broke, what is refused, and what to know."""
    labels = labels_of([one.after for one in comparison.every])
    _say(console, f"{comparison.before} → {comparison.after}: {headline(comparison)}", "bold")
    source = "estimated from these jobs" if comparison.noise_estimated else "assumed"
    if comparison.changes:
        _say(
            console,
            f"intervals: {units.percent(comparison.confidence)} · noise between runs "
            f"{units.percent(comparison.noise)}, {source}",
            "dim",
        )
    told = [c for c in comparison.changes if c.significant or every]
    if told:
        console.print()
        console.print(_table(told if every else told[:MOST_LINES], labels))
        if not every and len(told) > MOST_LINES:
            _say(console, f"… and {len(told) - MOST_LINES:,} more; --all lists all.", "dim")
    _figures(comparison.changes, console, labels)
    _turned(comparison.turned, console, labels)
    _refused(comparison.refused, console)
    for (key, before, after), jobs in comparison.warnings.items():
        _say(
            console,
            f"! {key} differs in {units.plural(jobs, 'job')}: {one_line(before, 200)} → "
            f"{one_line(after, 200)}",
            "yellow",
        )


def headline(comparison: RunComparison) -> str:
    """``48 jobs compared, 2 slower, 1 faster, 45 unchanged within noise; 0.998× overall``."""
    slower = sum(c.significant and c.ratio.value < 1 for c in comparison.changes)
    faster = sum(c.significant and c.ratio.value > 1 for c in comparison.changes)
    untested = sum(c.ratio.low is None for c in comparison.changes)
    same = len(comparison.changes) - slower - faster - untested
    words = [
        f"{units.plural(len(comparison.changes), 'job')} compared",
        f"{slower:,} slower",
        f"{faster:,} faster",
        f"{same:,} unchanged within noise",
    ]
    words += [f"{untested:,} with too few repeats to say"] if untested else []
    words += [f"{len(comparison.broken):,} broken"] if comparison.broken else []
    words += [f"{len(comparison.refused):,} not comparable"] if comparison.refused else []
    alone = comparison.only_before + comparison.only_after
    words += [f"{alone:,} in one run only"] if alone else []
    overall = comparison.overall
    end = f"; {overall:.3f}× overall" if overall is not None else ""
    return ", ".join(words) + end


def comparison_json(comparison: RunComparison, limit: float | None = None) -> dict[str, object]:
    """The comparison as one JSON-able object."""
    return {
        "before": comparison.before,
        "after": comparison.after,
        "confidence": comparison.confidence,
        "noise": finite(comparison.noise),
        "noise_estimated": comparison.noise_estimated,
        "overall_ratio": finite(comparison.overall),
        "changes": [_change_json(change, limit) for change in comparison.changes],
        "turned": [
            _named(t.after)
            | {"before": str(t.before.state), "after": str(t.after.state), "broken": t.broken}
            for t in comparison.turned
        ],
        "refused": [
            _named(r.after)
            | {
                "differences": [
                    {"key": d.key, "before": d.before, "after": d.after} for d in r.differences
                ]
            }
            for r in comparison.refused
        ],
        "warnings": [
            {"key": key, "before": before, "after": after, "jobs": jobs}
            for (key, before, after), jobs in comparison.warnings.items()
        ],
        "only_before": comparison.only_before,
        "only_after": comparison.only_after,
    }


def _change_json(change: Change, limit: float | None) -> dict[str, object]:
    record = _named(change.after) | {
        "throughput_before": finite(change.before.metrics.throughput),
        "throughput_after": finite(change.after.metrics.throughput),
        "unit": change.after.metrics.throughput_unit,
        "ratio": finite(change.ratio.value),
        "ratio_low": finite(change.ratio.low),
        "ratio_high": finite(change.ratio.high),
        "p_value": finite(change.ratio.p_value),
        "significant": change.significant,
        "figures": [
            {
                "name": each.metric.name,
                "title": each.metric.title,
                "unit": each.metric.unit,
                "better": each.metric.better,
                "before": finite(each.before),
                "after": finite(each.after),
                "improved": each.improved,
            }
            for each in figure_changes(change.before, change.after)
        ],
    }
    if limit is not None:
        record["regression"] = change.significant and change.slower_by >= limit
    return record


def _named(row: Measurement) -> dict[str, object]:
    return {
        "job_id": row.job_id,
        "workload": row.workload,
        "model": row.model,
        "dataset": row.dataset,
        "accelerator": str(row.accelerator),
        "cards": row.cards,
        "precision": row.precision,
        "batch_size": row.batch_size_requested,
        "engine": row.engine,
        "parameters": dict(row.parameters),
        "emulated": row.emulated,
    }


def _table(changes: Sequence[Change], labels: Mapping[str, Label]) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    grid.add_column("job", overflow="fold")
    for name in ("before", "after", "change", "interval"):
        grid.add_column(name, justify="right")
    for change in changes:
        ratio = change.ratio
        style = "dim"
        if change.significant:
            style = "bold red" if ratio.value < 1 else "green"
        interval = "too few repeats"
        if ratio.low is not None and ratio.high is not None:
            interval = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        grid.add_row(
            Text(one_line(_job(change.after, labels))),
            units.number(change.before.metrics.throughput),
            units.number(change.after.metrics.throughput),
            Text(f"{ratio.value - 1:+.1%}", style=style),
            interval,
        )
    return grid


def _job(row: Measurement, labels: Mapping[str, Label]) -> str:
    """A job's label, and whether its cards were emulated."""
    return f"{labels[row.job_id]}{' emulated' if row.emulated else ''}"


def _figures(changes: Sequence[Change], console: Console, labels: Mapping[str, Label]) -> None:
    """Reported figures that have got better or worse, by the direction declared for each."""
    told = [
        (change, each)
        for change in changes
        for each in figure_changes(change.before, change.after)
        if each.improved is not None
    ]
    if told:
        console.print()
    for change, each in told[:MOST_LINES]:
        style = "green" if each.improved else "bold red"
        _say(console, f"{labels[change.after.job_id]}: {each}", style)
    if len(told) > MOST_LINES:
        _say(console, f"… and {len(told) - MOST_LINES:,} more; --json has all.", "dim")


def _turned(turned: Sequence[Turned], console: Console, labels: Mapping[str, Label]) -> None:
    if not turned:
        return
    console.print()
    for one in turned[:MOST_LINES]:
        style = "bold red" if one.broken else ""
        _say(
            console,
            f"{one.before.state} → {one.after.state}: {labels[one.after.job_id]}"
            + (f": {one_line(one.after.reason, 120)}" if one.after.reason else ""),
            style,
        )
    if len(turned) > MOST_LINES:
        _say(console, f"… and {len(turned) - MOST_LINES:,} more; --json has all.", "dim")


def _refused(refused: Sequence[Refused], console: Console) -> None:
    if not refused:
        return
    console.print()
    counted = Counter((d.key, d.before, d.after) for r in refused for d in r.differences)
    _say(console, f"Not comparable: {units.plural(len(refused), 'job')}", "bold yellow")
    for (key, before, after), jobs in counted.most_common(MOST_LINES):
        _say(console, f"  {_told(key, before, after, units.plural(jobs, 'job'))}")


def _told(key: str, before: str, after: str, jobs: str) -> str:
    """The reason for which pairs are refused. Of a key such as ``flags`` both rows of a pair may
    have the same forbidden value."""
    if before == after:
        return f"{key} in {jobs}, before and after: {one_line(before, 120)}"
    return f"{key} differs in {jobs}: {one_line(before, 120)} → {one_line(after, 120)}"


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style=style))
