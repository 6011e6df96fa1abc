"""Techniques, scaling, limits and published figures as plain tables, for terminal and Markdown."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.report import cells, units
from orchestrator.report.contests import work_of
from orchestrator.report.grouping import Differences, described, unusual
from orchestrator.report.labels import label
from orchestrator.report.published import REFERENCES
from orchestrator.report.ratio import Ratio
from orchestrator.report.summary import SHORT_STATE, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One table. ``numbers`` are the columns that are set right; ``note`` stands below it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...]
    note: str = ""


def findings(summary: Summary) -> tuple[Finding, ...]:
    """The tables that have something to say, in the page's order."""
    every = (
        _effects(summary),
        _steps(summary),
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


def _steps(summary: Summary) -> Finding:
    work = {one.row.job_id: work_of(summary.settings[one.row.job_id]) for one in summary.steps}
    apart = unusual(work.values())
    rows = []
    for one in summary.steps:
        about = described(apart[work[one.row.job_id]])
        shares = (one.data, one.forward, one.backward, one.optimizer, one.communication)
        rows.append(
            (
                label(one.row) + (f" · {about}" if about else ""),
                units.seconds(one.step_s),
                *(units.percent(share, 2) for share in shares),
            )
        )
    shared = any(one.communication is not None for one in summary.steps)
    return Finding(
        title="Where the time of a training step goes",
        head=("job", "step", "data", "forward", "backward", "optimizer", "waiting"),
        rows=tuple(rows),
        numbers=tuple(range(1, 7)),
        note="Waiting for other cards is a part of the times beside it." if shared else "",
    )


def replicates(summary: Summary) -> Finding:
    """Cells that ran in several processes: the mean, its interval, and both parts of its
    variance."""
    rows = []
    for cell in summary.joined.cells:
        mean, spread = cell.row.metrics.throughput, cell.spread
        known = spread is not None and mean
        rows.append(
            (
                label(replace(cell.row, replicate=1)),
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
            label(share.row),
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
