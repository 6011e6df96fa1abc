"""Jobs of each card over time, as an SVG drawing that the page zooms (``timeline.js``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from orchestrator.core.measurement import Measurement
from orchestrator.report import units
from orchestrator.report.drawing import WIDE, nice_top, svg, text_at
from orchestrator.report.payload import shown_spans
from orchestrator.report.safe import one_line
from orchestrator.report.timeline import Lane, Timeline

LEFT, RIGHT, TOP = 120, 44, 24
SPANS_WIDE = WIDE - LEFT - RIGHT
#: Of windows of several invocations, which are laid end to end.
MOST_GAP = 9.0
_NAMED_FROM = 56  # pixels of a span that has room for its setting
#: A shorter run has its ticks in seconds.
_IN_MINUTES_S = 180.0


def cards_figure(
    timeline: Timeline, title: str, names_of: Callable[[Measurement], Sequence[str]]
) -> str:
    """Attempts in the colour of their end, a line a card; the time between runs is left out.

    The spans lie in a drawing of their own, which can be stretched: its ``rect`` elements are in
    the order of ``shown_spans``.
    """
    lanes, windows = timeline.lanes, timeline.windows
    high = 20 if len(lanes) <= 24 else 14 if len(lanes) <= 128 else 9
    gap = min(MOST_GAP, 60 / len(windows))
    wall = timeline.wall_s or 1.0
    scale = (SPANS_WIDE - gap * (len(windows) - 1)) / wall  # pixels a second
    begun, before = [], 0.0
    for number, (start, end) in enumerate(windows):
        begun.append((start, gap * number + before * scale))
        before += end - start
    states: dict[str, None] = {}
    rects, names = [], []
    for number, span, jobs in shown_spans(timeline):
        since, at = next(one for one in reversed(begun) if one[0] <= span.start)
        x = at + (span.start - since) * scale
        wide = max(0.7, (span.end - span.start) * scale - 0.6)
        state = str(span.row.state)
        states[state] = None
        probe = span.row.purpose != "measure"
        faint = ' opacity="0.5"' if probe else ""
        rects.append(
            f'<rect class="s-{state.lower()}" x="{x:.1f}" y="{high * number + 1}" '
            f'width="{wide:.1f}" height="{high - 2}"{faint}/>'
        )
        if wide > _NAMED_FROM and high > 10 and jobs == 1 and not probe:
            name = _fitting(names_of(span.row), max(3, int((wide - 10) / 5.6)))
            names.append(text_at(LEFT + x + 5, TOP + high * (number + 0.5) + 4, name, "inside"))
    tall = high * len(lanes)
    gaps = "".join(f"M{x - gap / 2:.1f} 0V{tall}" for _, x in begun[1:])
    bed = f"h{SPANS_WIDE}v{high - 2}h-{SPANS_WIDE}z"
    beds = "".join(f"M0 {high * number + 1}{bed}" for number in range(len(lanes)))
    return svg(
        title,
        *_legend(states),
        f'<svg class="spans" x="{LEFT}" y="{TOP}" width="{SPANS_WIDE}" height="{tall}" '
        f'viewBox="0 0 {SPANS_WIDE} {tall}" preserveAspectRatio="none">',
        f'<path class="lane" d="{beds}"/><path class="ideal" d="{gaps}"/>',
        *rects,
        "</svg>",
        *names,
        *_lane_names(lanes, high),
        *_times(wall, scale, len(windows), TOP + tall + 14),
        size=(WIDE, TOP + tall + 20),
    )


def _fitting(names: Sequence[str], letters: int) -> str:
    """The first of the names, longest first, that has no more letters; else the last, cut."""
    return next((one for one in names if len(one) <= letters), one_line(names[-1], letters))


def _legend(states: Sequence[str] | dict[str, None]) -> Iterator[str]:
    for place, state in enumerate(states):
        x = LEFT + 118 * place
        yield f'<rect class="state s-{state.lower()}" x="{x}" y="3" width="9" height="9"/>'
        yield text_at(x + 13, 12, state, "small")
    yield text_at(WIDE, 12, "assigned", "small", "end")


def _lane_names(lanes: Sequence[Lane], high: int) -> Iterator[str]:
    """The name of each card and the share of time assigned, where lines are high enough."""
    for number, lane in enumerate(lanes):
        y = TOP + high * (number + 0.5) + 4
        if high > 10 or number == 0 or lanes[number - 1].node != lane.node:
            yield text_at(LEFT - 6, y, one_line(lane.name, 18), "small", "end")
        if high > 10:
            yield text_at(WIDE, y, units.percent(lane.assigned), "small", "end")


def _times(wall: float, scale: float, windows: int, y: float) -> Iterator[str]:
    """Ticks of the time since the start; of several windows, how long they are together."""
    if windows > 1:
        told = f"{units.seconds(wall)} in {windows} invocations, laid end to end"
        yield text_at(LEFT, y, told, "small")
        return
    unit_s, unit = (60, "min") if wall >= _IN_MINUTES_S else (1, "s")
    _, step = nice_top(wall / unit_s)
    for tick in range(int(wall / unit_s / step) + 1):
        x = LEFT + tick * step * unit_s * scale
        yield text_at(x, y, f"{tick * step:g} {unit}", "small time", "middle")
