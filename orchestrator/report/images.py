"""Every figure as PNG, drawn by matplotlib for papers, slides and issue comments.

The page draws its own; this is the optional extra ``report``. Precisions keep the colours and the
shapes that they have on the page. Emulated cards, random weights and synthetic data are written
into every picture, since a picture travels without its page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.domain.measurement import Measurement
from orchestrator.errors import ExtraMissing, StoreError
from orchestrator.report import cells, units
from orchestrator.report.contests import interval
from orchestrator.report.drawing import precision_style
from orchestrator.report.effects import Effect
from orchestrator.report.fronts import Front, latency, throughput
from orchestrator.report.grouping import Setting, described
from orchestrator.report.plots import step_flops
from orchestrator.report.published import Comparison
from orchestrator.report.roofline import Share
from orchestrator.report.safe import one_line, visible
from orchestrator.report.scaling import Scaling
from orchestrator.report.summary import Summary, Table
from orchestrator.report.timeline import Timeline

#: Pictures of one kind; a grid of thousands of jobs has hundreds of tables, and the CSV has all.
MOST_IMAGES = 24
COLOURS = ("#40474d", "#1f78b4", "#1047a9", "#a53f8a", "#9c5a00", "#007a56")
MARKERS = ("o", "s", "D", "^", "v", "P")
STATE_COLOURS = {
    "SUCCEEDED": "#1e7369",
    "OUT_OF_MEMORY": "#94500a",
    "FAILED": "#b3261e",
    "TIMED_OUT": "#b3432a",
    "LOST": "#7a3f9d",
}

Draw = Callable[[Any], None]  # onto a matplotlib Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One picture to draw. ``size`` is in inches."""

    name: str
    title: str
    draw: Draw
    size: tuple[float, float] = (7.2, 4.5)


def write_images(summary: Summary, directory: Path) -> tuple[list[Path], int]:
    """Draw every figure into ``directory``; the paths, and how many were left out by the limit.

    Raises:
        ExtraMissing: matplotlib is not installed.
        StoreError: a file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExtraMissing("matplotlib", extra="report", wanted_for="PNG figures") from error
    images, left_out = images_of(summary)
    paths = []
    settings: Any = {
        "font.family": ["DejaVu Sans"],
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(settings):
        for image in images:
            figure = Figure(figsize=image.size, dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            image.draw(figure)
            figure.suptitle(_plain(image.title), fontsize=10)
            if note := _note(summary):
                figure.supxlabel(_plain(note), fontsize=7, color="#8a5a00")
            path = directory / f"{image.name}.png"
            try:
                figure.savefig(path, metadata={"Software": "nightgrid"})
            except OSError as error:
                raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
            paths.append(path)
    return paths, left_out


def images_of(summary: Summary) -> tuple[list[Image], int]:
    """The images to draw, and the number that the limit leaves out."""
    kinds: list[list[Image]] = [
        [_heat_map(n, table) for n, table in enumerate(summary.tables, 1)],
        [_curve(n, t) for n, t in enumerate(summary.tables, 1) if len(_measured(t)) > 1],
        [_front(n, front, summary.chosen) for n, front in enumerate(summary.fronts, 1)],
        [_prompts(summary)] if any(row.items for row in summary.rows) else [],
        [_effects(summary.effects)] if summary.effects else [],
        [_scaling(n, group) for n, group in enumerate(_scalings(summary), 1)],
        [_roofline(n, group) for n, group in enumerate(_shares(summary), 1)],
        [_published(n, one) for n, one in enumerate(summary.published, 1)],
        [_timeline(summary.timeline)] if summary.timeline.lanes else [],
    ]
    shown = [image for kind in kinds for image in kind[:MOST_IMAGES]]
    return shown, sum(max(0, len(kind) - MOST_IMAGES) for kind in kinds)


def _heat_map(number: int, table: Table) -> Image:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        values = [
            [_share(table, precision, size) for size in table.batch_sizes]
            for precision in table.precisions
        ]
        axes.imshow(values, cmap="GnBu", vmin=0, vmax=1.35, aspect="auto")
        for y, precision in enumerate(table.precisions):
            for x, size in enumerate(table.batch_sizes):
                text = cells.cell_text(table, precision, size)
                axes.text(x, y, _plain(f"{text.value}{text.mark}"), ha="center", va="center",
                          fontsize=8, color="#1b2126")  # fmt: skip
        axes.set_xticks(range(len(table.batch_sizes)), map(_plain, table.batch_sizes))
        axes.set_yticks(range(len(table.precisions)), map(_plain, table.precisions))
        axes.set_xlabel("batch size per card")
        axes.set_title(f"{table.unit or 'state'}; * best, ~ tied", fontsize=8)

    size = (max(5.0, 0.75 * len(table.batch_sizes) + 1.5), 0.5 * len(table.precisions) + 1.8)
    return Image(name=f"heat-map-{number:02d}", title=_title(table), draw=draw, size=size)


def _share(table: Table, precision: str, size: str) -> float:
    row = table.cells.get((precision, size))
    top = table.top
    value = row.metrics.throughput if row else None
    return (value or 0.0) / top if top and math.isfinite(top) else 0.0


def _measured(table: Table) -> set[int]:
    return {
        row.batch_size
        for row in table.cells.values()
        if row.metrics.throughput is not None and row.batch_size is not None
    }


def _curve(number: int, table: Table) -> Image:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        highest = 0.0
        for precision in table.precisions:
            rows = [table.cells.get((precision, size)) for size in table.batch_sizes]
            known = sorted(
                (row.batch_size, row.metrics.throughput, *interval(row))
                for row in rows
                if row and row.metrics.throughput is not None and row.batch_size is not None
            )
            if not known:
                continue
            sizes, values, lows, highs = zip(*known, strict=True)
            highest = max(highest, *values)
            # The logarithm of no throughput is below zero tokens: a bar ends there.
            # The value may lie outside: it is of all repeats together, the ends of their mean.
            below = [max(0.0, v - max(0.0, low)) for v, low in zip(values, lows, strict=True)]
            above = [max(0.0, high - v) for v, high in zip(values, highs, strict=True)]
            style = precision_style(precision)
            axes.errorbar(
                sizes,
                values,
                yerr=[below, above],
                color=COLOURS[style],
                marker=MARKERS[style],
                markersize=5,
                linewidth=1.4,
                elinewidth=0.9,
                capsize=2.5,
                label=_plain(precision),
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(0, highest * 1.35)
        axes.set_xlabel("batch size per card")
        axes.set_ylabel(_plain(table.unit))
        axes.legend(frameon=False, fontsize=8)
        axes.grid(axis="y", color="#e2ded6", linewidth=0.7)

    return Image(name=f"throughput-against-batch-size-{number:02d}", title=_title(table), draw=draw)


def _front(number: int, front: Front, chosen: Callable[[Measurement], str]) -> Image:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for rows, alpha in ((front.beaten, 0.35), (front.best, 1.0)):
            for row in rows:
                style = precision_style(row.precision)
                axes.plot(latency(row), throughput(row), MARKERS[style], color=COLOURS[style],
                          alpha=alpha, markersize=6, markeredgewidth=0)  # fmt: skip
        axes.plot([latency(r) for r in front.best], [throughput(r) for r in front.best],
                  color="#1b2126", linewidth=1, alpha=0.6, zorder=1)  # fmt: skip
        for row in front.best:
            axes.annotate(_plain(chosen(row)), (latency(row), throughput(row)),
                          xytext=(6, -9), textcoords="offset points", fontsize=7)  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            for place in (axis.set_major_formatter, axis.set_minor_formatter):
                place(lambda value, _: f"{value:,g}")
        axes.tick_params(which="both", labelsize=7)
        axes.set_xlabel("median latency of a prompt, s")
        axes.set_ylabel(_plain(front.unit))
        axes.grid(color="#e2ded6", linewidth=0.7)

    title = _of(front.setting)
    return Image(name=f"throughput-against-latency-{number:02d}", title=title, draw=draw)


def _prompts(summary: Summary) -> Image:
    def draw(figure: Any) -> None:
        axes = figure.add_subplot(projection="3d")
        by_precision: dict[str, list[tuple[int, int, float]]] = {}
        for row in summary.rows:
            for _, item in row.items:
                point = (item.input_tokens + item.output_tokens, item.output_tokens, item.latency_s)
                by_precision.setdefault(row.precision, []).append(point)
        for precision, points in by_precision.items():
            style = precision_style(precision)
            axes.scatter(*zip(*points, strict=True), s=11, color=COLOURS[style],
                         marker=MARKERS[style], alpha=0.6, linewidths=0,
                         label=_plain(precision))  # fmt: skip
        axes.set_xlabel("input + output, tokens", fontsize=8)
        axes.set_ylabel("output, tokens", fontsize=8)
        axes.set_zlabel("latency, s", fontsize=8)
        axes.legend(frameon=False, fontsize=8)

    title = f"{summary.run}: each point is one prompt"
    return Image(name="prompts", title=title, draw=draw, size=(7.2, 6.0))


def _effects(effects: Sequence[Effect]) -> Image:
    shown = effects[:60]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, effect in enumerate(reversed(shown)):
            ratio = effect.ratio
            colour = "#7d8790"
            if ratio.decided:
                colour = "#1e7369" if ratio.value > 1 else "#b3432a"
            if ratio.low is not None and ratio.high is not None:
                axes.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=1.6)
            axes.plot(ratio.value, place, "o", color=colour, markersize=5)
        names = [
            f"{e.name.replace('_', ' ')} {e.before or 'unset'} → {e.after or 'unset'}, "
            f"{e.setting.model} {e.setting.where}"
            for e in reversed(shown)
        ]
        axes.set_yticks(range(len(shown)), [_plain(name) for name in names], fontsize=7)
        axes.axvline(1, color="#596169", linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}×")
        axes.tick_params(axis="x", which="both", labelsize=7)
        axes.set_xlabel("throughput, times the baseline's")

    size = (8.0, 1.4 + 0.26 * len(shown))
    title = "What each technique buys" + (
        f" (the first {len(shown)} of {len(effects)})" if len(effects) > len(shown) else ""
    )
    return Image(name="techniques", title=title, draw=draw, size=size)


def _scalings(summary: Summary) -> list[list[Scaling]]:
    groups: dict[Setting, list[Scaling]] = {}
    for one in summary.scalings:
        groups.setdefault(one.setting, []).append(one)
    return list(groups.values())


def _scaling(number: int, group: Sequence[Scaling]) -> Image:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for one in group:
            style = precision_style(one.precision)
            axes.plot([s.row.cards for s in one.steps], [s.efficiency for s in one.steps],
                      color=COLOURS[style], marker=MARKERS[style], linewidth=1.4, markersize=5,
                      label=_plain(f"{one.precision} b={one.batch_size}"))  # fmt: skip
        axes.axhline(1, color="#596169", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_ylim(0, None)
        axes.set_xlabel("cards")
        axes.set_ylabel("efficiency")
        axes.legend(frameon=False, fontsize=8)

    return Image(name=f"scaling-{number:02d}", title=_of(group[0].setting), draw=draw)


def _shares(summary: Summary) -> list[list[Share]]:
    groups: dict[str, list[Share]] = {}
    for share in summary.roofline.shares:
        if share.intensity and step_flops(share) and share.sheet.bandwidth_bytes_per_s:
            groups.setdefault(share.sheet.device, []).append(share)
    return list(groups.values())


def _roofline(number: int, shares: Sequence[Share]) -> Image:
    sheet = shares[0].sheet

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        slope = sheet.bandwidth_bytes_per_s or 1.0
        across = [share.intensity or 1.0 for share in shares]
        kinds = [kind for kind in sheet.flops if any(s.arithmetic == kind for s in shares)]
        for kind in kinds or list(sheet.flops):
            peak = sheet.flops[kind]
            ridge = peak / slope
            points = (min(across) / 2, ridge, max(*across, ridge) * 3)
            roof = [min(peak, slope * x) / 1e12 for x in points]
            axes.plot(points, roof, color="#1b2126", linewidth=1.2)
            axes.annotate(kind, (points[-1], roof[-1]), fontsize=8, va="bottom", ha="right")
        for share in shares:
            style = precision_style(share.row.precision)
            axes.plot(share.intensity or 1.0, (step_flops(share) or 1.0) / 1e12, MARKERS[style],
                      color=COLOURS[style], markersize=5, markeredgewidth=0)  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("operations per byte of weights")
        axes.set_ylabel("TFLOP/s of a decoding step")

    title = f"Roofline of {sheet.device}\n{one_line(sheet.source, 80)}"
    return Image(name=f"roofline-{number:02d}", title=title, draw=draw)


def _published(number: int, one: Comparison) -> Image:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        lines = list(reversed(one.lines))
        names = [
            f"{'this run' if line.ours else 'published'}: {line.figure.device}, "
            f"{line.figure.precision}, batch {line.figure.batch_size}"
            for line in lines
        ]
        colours = ["#0b6a70" if line.ours else "#a2a9af" for line in lines]
        bars = axes.barh(range(len(lines)), [line.figure.value for line in lines], color=colours)
        told = [units.number(line.figure.value) for line in lines]
        axes.bar_label(bars, told, fontsize=8, padding=3)
        axes.set_yticks(range(len(lines)), [_plain(name) for name in names], fontsize=8)
        axes.set_xlabel(one.unit + (", less is better" if one.lower_is_better else ""))

    title = f"{one.task.replace('-', ' ')}: {one.model}, {units.plural(one.cards, 'card')}"
    size = (7.2, 1.4 + 0.35 * len(one.lines))
    return Image(name=f"published-{number:02d}", title=title, draw=draw, size=size)


def _timeline(timeline: Timeline) -> Image:
    lanes = timeline.lanes[:128]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        origin = timeline.windows[0][0] if timeline.windows else 0.0
        for place, lane in enumerate(lanes):
            spans = [((s.start - origin) / 60, (s.end - s.start) / 60) for s in lane.spans]
            colours = [STATE_COLOURS.get(str(s.row.state), "#7d8790") for s in lane.spans]
            axes.broken_barh(spans, (place - 0.42, 0.84), facecolors=colours, edgecolor="white",
                             linewidth=0.4)  # fmt: skip
        axes.set_yticks(range(len(lanes)), [_plain(lane.name) for lane in lanes], fontsize=6)
        axes.invert_yaxis()
        from matplotlib.patches import Patch

        seen = dict.fromkeys(str(span.row.state) for lane in lanes for span in lane.spans)
        boxes = [Patch(color=STATE_COLOURS.get(state, "#7d8790"), label=state) for state in seen]
        axes.legend(handles=boxes, frameon=False, fontsize=6, ncols=len(boxes),
                    loc="lower right", bbox_to_anchor=(1, 1))  # fmt: skip
        axes.set_xlabel("minutes since the first start")

    busy = f"{len(timeline.lanes)} cards, busy {units.percent(timeline.utilization, 3)}"
    size = (9.0, 1.2 + 0.16 * len(lanes))
    return Image(name="cards", title=busy, draw=draw, size=size)


def _note(summary: Summary) -> str:
    """Warnings about numbers that are not real, for the foot of every picture."""
    flags = [f"{f.name.lower()} in {f.count} of {f.of} rows" for f in summary.flags]
    return ("Beware: " + ", ".join(flags)) if flags else ""


def _title(table: Table) -> str:
    about = described(table.about)
    return table.title + (f"\n{about}" if about else "")


def _of(setting: Setting) -> str:
    parameters = described(dict(setting.parameters))
    return f"{setting.model} on {setting.where}\n{parameters}"


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: a dollar sign would begin mathematics."""
    return visible(text).replace("$", r"\$")
