"""Techniques, scaling, limits and published figures as plain tables, for terminal and Markdown."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.analysis.hardware import REFERENCES
from orchestrator.analysis.rankings import HeadToHead
from orchestrator.analysis.ratio import Ratio
from orchestrator.analysis.selection import Differences, described
from orchestrator.analysis.summary import SHORT_STATE, Summary
from orchestrator.core.measurement import Measurement
from orchestrator.report import cells
from orchestrator.report.finding import Finding
from orchestrator.report.forms import forms
from orchestrator.util import format as units


def findings(summary: Summary) -> tuple[Finding, ...]:
    """The tables that have something to say, in the page's order."""
    every = (
        *head_to_head(summary),
        _effects(summary),
        forms(summary),
        training(summary),
        replicates(summary),
        _scaling(summary),
        _roofline(summary),
        _published(summary),
    )
    return tuple(finding for finding in every if finding.rows or finding.note)


def ratio_text(ratio: Ratio) -> str:
    """``1.52× (1.40× to 1.65×)``."""
    if ratio.low is None:
        return units.times(ratio.value)
    return f"{units.times(ratio.value)} ({units.times(ratio.low)} to {units.times(ratio.high)})"


def _effects(summary: Summary) -> Finding:
    apart = Differences.among([effect.told for effect in summary.effects])
    rows = []
    for effect in summary.effects:
        about = described(apart.of(effect.told))
        batches = ",".join(pair.row.batch_size_requested for pair in effect.pairs)
        rows.append(
            (
                f"{effect.name.replace('_', ' ')}: {effect.before or 'unset'} → "
                f"{effect.after or 'unset'}",
                f"{effect.setting.model}, {effect.setting.where}, b={batches}"
                + (f" · {about}" if about else ""),
                ratio_text(effect.ratio) + ("" if effect.ratio.decided else " ~"),
                units.times(effect.token_ratio),
                units.times(effect.memory_ratio),
            )
        )
    return Finding(
        title="What each technique buys",
        head=("changed", "where", "throughput", "real tokens/s", "memory"),
        rows=tuple(rows),
        numbers=(2, 3, 4),
        note="~ tied with the baseline" if any(r[2].endswith("~") for r in rows) else "",
    )


def training(summary: Summary) -> Finding:
    """Rows that trained, the fastest first: the loss of their first and last timed step, and where
    the time of a step goes."""
    steps = {one.row.job_id: one for one in summary.steps}
    trained = [row for row in summary.joined.rows if cells.losses(row) or row.job_id in steps]
    units_ = {row.metrics.throughput_unit for row in trained}
    unit = units_.pop() if len(units_) == 1 else ""
    rows = []
    for row in sorted(trained, key=lambda row: row.metrics.throughput or 0.0, reverse=True):
        step = steps.get(row.job_id)
        shares = (
            (step.data, step.forward, step.backward, step.optimizer, step.communication)
            if step
            else (None,) * 5
        )
        rows.append(
            (
                summary.label(row),
                f"{cells.figure(row)} {'' if unit else row.metrics.throughput_unit} "
                f"{cells.plus_minus(row)}".strip().replace("  ", " "),
                units.number(row.metrics.loss_first),
                units.number(row.metrics.loss_last),
                units.seconds(step.step_s if step else None),
                *(units.percent(share, 2) for share in shares),
            )
        )
    head = (unit or "throughput", "loss first", "loss last", "step", "data", "forward", "backward")
    note = "Loss of the first and of the last timed step. Then shares of a timed step."
    shared = any(one.communication is not None for one in summary.steps)
    found = Finding(
        title="Training",
        head=("job", *head, "optimizer", "waiting"),
        rows=tuple(rows),
        numbers=tuple(range(1, 10)),
        note=f"{note} Waiting for other cards is a part of the times beside it."
        if shared
        else note,
    )
    return _without_blanks(found)


def _without_blanks(finding: Finding) -> Finding:
    """The table without columns that say nothing in any row, and without a note of no rows."""
    kept = [
        column
        for column in range(len(finding.head))
        if any(row[column] != units.MISSING for row in finding.rows)
    ]
    return replace(
        finding,
        head=tuple(finding.head[column] for column in kept),
        rows=tuple(tuple(row[column] for column in kept) for row in finding.rows),
        numbers=tuple(place for place, column in enumerate(kept) if column in finding.numbers),
        note=finding.note if finding.rows else "",
    )


def head_to_head(summary: Summary) -> tuple[Finding, ...]:
    """A table for each comparison of accelerators or engines: a column for each of them."""
    return tuple(map(_head_to_head, summary.head_to_head))


def _head_to_head(one: HeadToHead) -> Finding:
    def cell(row: Measurement | None, ratio: Ratio | None) -> str:
        if row is None:
            return units.MISSING
        figure = units.number(row.metrics.throughput)
        return figure if ratio is None else f"{figure}, {ratio_text(ratio)}{_tie(ratio)}"

    rows = [(line.label, *map(cell, line.rows, line.ratios)) for line in one.lines]
    if len(one.lines) > 1:
        means = ("1×" if ratio is None else f"{ratio_text(ratio)}{_tie(ratio)}"
                 for ratio in one.overall)  # fmt: skip
        rows.append(("all together", *means))
    note = f"{one.unit}, and times {one.sides[0]}'s with its interval. ~ tied."
    if one.left_out:
        note += f" {units.plural(one.left_out, 'slower setting')} not listed."
    return Finding(
        title="Head to head" if not one.workload else f"Head to head: {one.workload}",
        head=("setting", *one.sides),
        rows=tuple(rows),
        numbers=tuple(range(1, len(one.sides) + 1)),
        note=note,
    )


def _tie(ratio: Ratio) -> str:
    return "" if ratio.decided or ratio.low is None else " ~"


def replicates(summary: Summary) -> Finding:
    """Cells that ran in several processes: the mean, its interval, and both parts of its
    variance."""
    rows = []
    for cell in summary.joined.cells:
        mean, spread = cell.row.metrics.throughput, cell.spread
        known = spread is not None and mean
        rows.append(
            (
                summary.label(cell.row),
                f"{cell.row.metrics.processes} of {len(cell.replicates)}" if known else "1",
                cells.throughput(cell.row) if mean else SHORT_STATE[cell.row.state],
                units.percent(spread.between / mean, 2) if spread and mean else units.MISSING,
                units.percent(spread.within / mean, 2)
                if spread and mean and spread.within is not None
                else units.MISSING,
            )
        )
    return Finding(
        title="Replicates",
        head=("cell", "processes", "throughput", "between processes", "within one"),
        rows=tuple(rows),
        numbers=(1, 3, 4),
        note="Between processes: standard deviation, above what repeats explain. Within one: "
        "standard error of its mean. The interval holds both (Student's t over the processes' "
        "means)."
        if rows
        else "",
    )


def _scaling(summary: Summary) -> Finding:
    rows = [
        (
            f"{one.setting.model} {one.precision} b={one.batch_size} on {one.setting.accelerator}"
            + (", emulated" if one.setting.emulated else ""),
            f"{step.row.cards}",
            ratio_text(step.speedup),
            units.percent(step.efficiency, 3),
        )
        for one in summary.scalings
        for step in one.steps[1:]
    ]
    return Finding(
        title="Scaling over cards",
        head=("job", "cards", "speed-up", "efficiency"),
        rows=tuple(rows),
        numbers=(1, 2, 3),
    )


def _roofline(summary: Summary) -> Finding:
    roofline = summary.roofline
    near = sorted(
        roofline.shares, key=lambda s: max(s.bandwidth or 0.0, s.compute or 0.0), reverse=True
    )
    rows = [
        (
            summary.label(share.row),
            share.sheet.device,
            units.percent(share.bandwidth, 3),
            units.percent(share.compute, 3),
        )
        for share in near
    ]
    emulated = roofline.emulated
    note = f"None for {units.plural(emulated, 'row')} of emulated cards." if emulated else ""
    if roofline.unknown:
        note = f"{note} No data sheet for {units.listed(list(roofline.unknown))}.".strip()
    return Finding(
        title="Share of the card's limits",
        head=("job", "card", "bandwidth, at least", "compute"),
        rows=tuple(rows),
        numbers=(2, 3),
        note=note if rows else "",
    )


def _published(summary: Summary) -> Finding:
    rows = [
        (
            "this run" if line.ours else "published",
            f"{one.task}, {one.model}, {units.plural(one.cards, 'card')}",
            f"{line.figure.device} {line.figure.precision} b={line.figure.batch_size}",
            f"{units.number(line.figure.value)} {one.unit}",
            *(line.speedup(device) for device in REFERENCES),
        )
        for one in summary.published
        if one.measured
        for line in one.lines
    ]
    return Finding(
        title="Measured against published",
        head=("who", "task", "setting", "figure", *(f"over {device}" for device in REFERENCES)),
        rows=tuple(rows),
        numbers=tuple(range(3, 4 + len(REFERENCES))),
    )
