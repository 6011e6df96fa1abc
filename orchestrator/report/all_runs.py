"""All runs of a results directory as one static page: trends of jobs over nights, and each run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.analysis.comparison import RunComparison, compare
from orchestrator.analysis.selection import newest_final
from orchestrator.analysis.summary import summarize
from orchestrator.analysis.trends import Trend, Trends, trends_of
from orchestrator.core.errors import StoreError
from orchestrator.core.labels import labels_of
from orchestrator.core.measurement import Measurement
from orchestrator.report.svg import path_of, svg, text_at
from orchestrator.report.wording import answers
from orchestrator.store import disk
from orchestrator.store import files as run_files
from orchestrator.store.reader import about_how_many
from orchestrator.store.store import Store, existing_runs
from orchestrator.util import format as units

#: Most runs searched for the one before a run, and most rows read from each.
MOST_LOOKED_AT, MOST_ROWS = 20, 20_000
SHOWN_TRENDS = 300  # further ones are counted
WIDE, HIGH, EDGE = 260, 46, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A run in the list of all runs."""

    run: str
    at: float | None  # time of its last row
    jobs: int
    measured: int
    answer: str  # the first of its report
    page: str  # its own page, relative to this one; "" if there is none


def read_all(results: Path) -> tuple[list[RunLine], Trends, list[str]]:
    """Return lines newest first, trends and damage; raise StoreError if there is no run."""
    lines: list[RunLine] = []
    damaged: list[str] = []
    measured: list[Measurement] = []
    for run in existing_runs(results):
        try:
            rows = Store.existing(results, run).measurements(samples=False)
        except StoreError as error:
            damaged.append(f"{run}: {str(error).splitlines()[0]}")
            continue
        measured += [row for row in rows if row.final and row.metrics.throughput is not None]
        summary = summarize(rows)
        ends = [at for row in rows if (at := row.recorded_at or row.ended_at) is not None]
        page = f"{run}/{run_files.REPORT}"
        lines.append(
            RunLine(
                run=run,
                at=max(ends, default=None),
                jobs=len(summary.rows),
                measured=summary.measured,
                answer="".join(answers(summary)[:1]),
                page=page if os.path.isfile(results / page) else "",
            )
        )
    return lines, trends_of(measured), damaged


def since_last(store: Store) -> RunComparison | None:
    """Compare with the last rows of the same jobs, if any; raise StoreError if unreadable."""
    rows = store.measurements(samples=False)
    times: dict[str, float] = {}
    for row in rows:
        if row.metrics.throughput is not None:
            at = row.recorded_at or row.ended_at or 0.0
            times[row.invocation_id] = max(at, times.get(row.invocation_id, 0.0))
    if not times:
        return None
    last = max(times, key=times.__getitem__)
    now = newest_final([row for row in rows if row.invocation_id == last])
    before = newest_final([row for row in rows if row.invocation_id != last])
    for name, earlier in ((f"{store.run}, earlier", before), *_others(store)):
        comparison = compare(earlier, now, names=(name, store.run))
        if comparison.changes or comparison.turned:
            return comparison
    return None


def _others(store: Store) -> Iterator[tuple[str, Sequence[Measurement]]]:
    results = store.path.parent
    names = [name for name in existing_runs(results) if name != store.run]
    for name in names[:MOST_LOOKED_AT]:
        try:
            other = Store.existing(results, name)
            if about_how_many(disk.names(other.tables_path)) <= MOST_ROWS:
                yield name, newest_final(other.measurements(samples=False))
        except (StoreError, OSError):
            continue  # unreadable runs cannot be compared


def since_text(comparison: RunComparison) -> str:
    """Format as ``Since smoke-1: 1 slower (bf16 b=8 0.91×), 2 faster (…), 21 unchanged.``"""
    labels = labels_of([one.after for one in comparison.every])
    parts = []
    for word, group in (("slower", comparison.slower), ("faster", comparison.faster)):
        if group:
            names = [f"{labels[c.after.job_id]} {units.times(c.ratio.value)}" for c in group]
            parts.append(f"{len(group):,} {word} ({units.listed(names)})")
    same = sum(not change.significant for change in comparison.changes)
    parts += [f"{same:,} unchanged"] if same else []
    parts += [f"{len(comparison.broken):,} broken"] if comparison.broken else []
    return f"Since {comparison.before}: {', '.join(parts) or 'nothing to compare'}."


def headline(trends: Trends) -> str:
    """Return a sentence on which jobs changed over the nights."""
    nights, jobs = len(trends.nights), len(trends.trends)
    if not jobs:
        return "No job has been measured in two nights yet."
    over = f"over {units.plural(nights, 'night')}"
    changed = trends.changed
    if not changed:
        return f"None of {units.plural(jobs, 'job')} changed significantly {over}."
    first = changed[0]
    largest = max(first.changes, key=lambda one: abs(one.ratio - 1))
    since = trends.nights[first.points[largest.at].night]
    text = f"{first.label} is {units.times(largest.ratio)} since {since.run}"
    text += f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{len(changed):,} of {units.plural(jobs, 'job')} changed {over}: {text}."


def render(results: Path, lines: Sequence[RunLine], trends: Trends, damaged: Sequence[str]) -> str:
    """Return the page, which needs no script, network or other file."""
    from orchestrator.report.html import asset, environment

    template = environment().get_template("all.html.jinja")
    return template.render(
        results=str(results),
        headline=headline(trends),
        lines=lines,
        trends=trends,
        damaged=damaged,
        changed=trends.changed,
        same=[trend for trend in trends.trends if not trend.changes],
        SHOWN_TRENDS=SHOWN_TRENDS,
        spark=spark,
        style=asset("page.css"),
    )


def spark(trend: Trend, title: str) -> str:
    """Draw the series: points with intervals, a dashed line at each change."""
    values = [point.value for point in trend.points]
    ends = [v for point in trend.points for v in (point.low, point.high) if v is not None]
    low, high = min(*values, *ends), max(*values, *ends)
    room = (high - low) or 1.0
    nights = [point.night for point in trend.points]
    wide = max(1, nights[-1] - nights[0])

    def x(night: float) -> float:
        return EDGE + (WIDE - 2 * EDGE) * (night - nights[0]) / wide

    def y(value: float) -> float:
        return HIGH - EDGE - (HIGH - 2 * EDGE) * (value - low) / room

    line = path_of((x(point.night), y(point.value)) for point in trend.points)
    bars = "".join(
        f"M{x(p.night):.1f} {y(p.low):.1f}V{y(p.high):.1f}"
        for p in trend.points
        if p.low is not None and p.high is not None
    )
    marks = "".join(
        f"M{(x(nights[one.at - 1]) + x(nights[one.at])) / 2:.1f} 0V{HIGH}" for one in trend.changes
    )
    dot = "a2 2 0 1 0 4 0a2 2 0 1 0-4 0z"
    dots = "".join(f"M{x(p.night) - 2:.1f} {y(p.value):.1f}{dot}" for p in trend.points)
    parts = [
        f'<path class="ideal" d="{marks}"/>' if marks else "",
        f'<g class="p2"><path class="bar" d="{bars}"/><path class="line" d="{line}"/>'
        f'<path class="mark" d="{dots}"/></g>',
        text_at(WIDE + 6, 12, units.number(high, 3), "small"),
        text_at(WIDE + 6, HIGH - 2, units.number(low, 3), "small"),
    ]
    return svg(title, *parts, size=(WIDE + 56, HIGH), kind="curve spark")
