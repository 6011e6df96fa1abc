"""Tables of a run's cells, on the two axes that vary.

Usually precision and batch size. If one of the two varies, the settings are the lines of one table;
if neither does, the two settings that vary are the axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from orchestrator.analysis.flags import Raised, bounds_of, ranked
from orchestrator.analysis.rankings import rankings_of
from orchestrator.analysis.selection import Differences, Setting, precision_rank
from orchestrator.core.job import UNANSWERED
from orchestrator.core.labels import Label
from orchestrator.core.measurement import Measurement, Prediction

PRECISION, BATCH, SETTING = "precision", "batch size per card", "setting"
#: Most settings that share one table; more get one each.
MOST_SHARED_LINES = 60
AS_USUAL = "as usual"
#: Least probability that a cell runs, and widest interval, of predicted figures in tables.
LIKELY, WIDEST = 0.5, 1.0
#: Scales are logarithmic if the median is below this share of the highest throughput.
PALE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells by line and column; cells outside the grid are absent."""

    setting: Setting  # only what its cells share
    cells: Mapping[tuple[str, str], Measurement]  # by (line, column)
    line_name: str = PRECISION
    column_name: str = BATCH
    lines: tuple[str, ...] = ()  # precisions from wide to narrow, settings by their fastest cell
    columns: tuple[str, ...] = ()  # "1", "2", …, "best", "max"
    #: What distinguishes it from other tables, besides model and device.
    about: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""  # of the throughput; "" when nothing succeeded
    best: frozenset[str] = frozenset()  # job ids of clear winners: one, unless work differed
    tied: frozenset[str] = frozenset()  # job ids of rows of which each may be the best
    flagged: frozenset[str] = frozenset()  # job ids of rows that rank nowhere
    bounds: frozenset[str] = frozenset()  # job ids of rows whose throughput is a lower bound
    #: Predicted throughput of cells without a result, by job id; it ranks nowhere.
    predicted: Mapping[str, Prediction] = field(default_factory=dict)
    low: float = 0.0  # lowest throughput of its cells without flagged ones
    top: float = 0.0  # highest
    log: bool = False  # logarithmic colours and axis

    @property
    def title(self) -> str:
        """Model and hardware."""
        return f"{self.setting.model} on {self.setting.where}"

    @property
    def axes(self) -> str:
        """Axes, such as ``precision × batch size per card``."""
        return f"{self.line_name} × {self.column_name}"

    def heat(self, row: Measurement) -> float:
        """Return a cell's darkness, 0 to 1: how near its throughput is to the highest."""
        value = row.metrics.throughput or 0.0
        if row.job_id in self.flagged or not self.top or value <= 0:
            return 0.0
        if self.log and self.low < self.top:
            value = math.log(value / self.low) / math.log(self.top / self.low)
            return round(0.06 + 0.94 * value, 3)
        return round(value / self.top, 3)


def uneven(values: Sequence[float]) -> bool:
    """Return whether the highest value would bleach the others on a scale from zero."""
    return bool(values) and median(values) < PALE * max(values)


def tables_of(
    rows: Sequence[Measurement],
    settings: Mapping[str, Setting],
    labels: Mapping[str, Label],
    raised: Mapping[str, tuple[Raised, ...]],
    predictions: Iterable[Prediction] = (),
) -> tuple[Table, ...]:
    """Return tables that hold every row once, in the order of the rows."""
    predicted = {
        one.job_id: one
        for one in predictions
        if one.figure == "throughput" and one.runs >= LIKELY and one.plus_minus <= WIDEST
    }
    by_setting: dict[Setting, list[Measurement]] = {}
    for row in rows:
        by_setting.setdefault(settings[row.job_id], []).append(row)
    alike: dict[Setting, dict[Setting, list[Measurement]]] = {}
    for setting, group in by_setting.items():
        place = replace(setting, engine="", isolation="", parameters=())
        alike.setdefault(place, {})[setting] = group
    laid: list[Table] = []
    for groups in alike.values():
        together = _together(groups, labels) if 1 < len(groups) <= MOST_SHARED_LINES else None
        if together is not None:
            laid.append(together)
            continue
        for setting, group in groups.items():
            cells = {(row.precision, row.batch_size_requested): row for row in group}
            laid.append(Table(setting=setting, cells=cells))
    apart = Differences.among([one.setting for one in laid])
    return tuple(_with_figures(one, apart, settings, raised, predicted) for one in laid)


def _together(
    groups: Mapping[Setting, Sequence[Measurement]], labels: Mapping[str, Label]
) -> Table | None:
    """Return one table of all settings of a place, if their cells fit into one."""
    rows = [row for group in groups.values() for row in group]
    precisions = {row.precision for row in rows}
    sizes = {row.batch_size_requested for row in rows}
    if len(precisions) > 1 and len(sizes) > 1:
        return None
    first, *_ = groups
    pairs = set(first.parameters).intersection(*(one.parameters for one in groups))
    several = [n for n in ("engine", "isolation") if len({getattr(s, n) for s in groups}) > 1]
    texts: dict[str, Any] = dict.fromkeys(several, "")
    shared = replace(first, parameters=tuple(sorted(pairs)), **texts)
    if len(precisions) == len(sizes) == 1:
        pair = _two_settings(groups, shared)
        if pair is not None:
            return pair
    by_precision = len(precisions) > 1
    cells = {}
    for row in rows:
        line = labels[row.job_id].setting or AS_USUAL
        column = row.precision if by_precision else row.batch_size_requested
        if (line, column) in cells:
            return None
        cells[line, column] = row
    name = PRECISION if by_precision else BATCH
    return Table(setting=shared, line_name=SETTING, column_name=name, cells=cells)


def _two_settings(groups: Mapping[Setting, Sequence[Measurement]], shared: Setting) -> Table | None:
    """Return a table of the only two differing facts, if at least half of its cells exist."""
    apart = Differences.among(list(groups))
    names = [*apart.fields, *sorted(apart.parameters)]
    if len(names) != 2 or any(len(group) > 1 for group in groups.values()):
        return None
    values: dict[Setting, tuple[str, str]] = {}
    for setting in groups:
        known = dict(setting.parameters)
        one, other = (str(known.get(name) or getattr(setting, name, "")) for name in names)
        values[setting] = one, other
    if any("" in pair for pair in values.values()):
        return None
    first, second = ({pair[axis] for pair in values.values()} for axis in (0, 1))
    if min(len(first), len(second)) < 2 or len(first) * len(second) > 2 * len(groups):
        return None
    cells = {values[setting]: group[0] for setting, group in groups.items()}
    titles = [name.replace("_", " ") for name in names]
    if len(first) < len(second):  # the longer axis goes down
        cells, titles = {(b, a): row for (a, b), row in cells.items()}, titles[::-1]
    return Table(setting=shared, line_name=titles[0], column_name=titles[1], cells=cells)


def _with_figures(
    table: Table,
    apart: Differences,
    settings: Mapping[str, Setting],
    raised: Mapping[str, tuple[Raised, ...]],
    predicted: Mapping[str, Prediction],
) -> Table:
    """Return a table of which setting, axes and cells are known."""
    rows = list(table.cells.values())
    fit = ranked(rows, raised)
    bounds = bounds_of(raised)
    rankings = rankings_of(fit, settings, bounds)
    # With two units, the one with more rows is ranked.
    largest = max(rankings, key=lambda ranking: len(ranking.ranked), default=None)
    units = [row.metrics.throughput_unit for row in rows if row.metrics.throughput_unit]
    unit = largest.unit if largest is not None else next(iter(units), "")  # all are flagged
    own = [ranking for ranking in rankings if ranking.unit == unit]
    figures = [row.metrics.throughput for row in fit if row.metrics.throughput_unit == unit]
    values = [value for value in figures if value and math.isfinite(value) and value > 0]
    return replace(
        table,
        about=apart.of(table.setting),
        unit=unit,
        lines=_ordered(table, 0),
        columns=_ordered(table, 1),
        best=frozenset(one.winner.job_id for one in own if one.winner is not None),
        tied=frozenset(row.job_id for one in own for row in one.first),
        flagged=frozenset({row.job_id for row in rows} - {row.job_id for row in fit}),
        bounds=bounds & {row.job_id for row in rows},
        predicted={
            row.job_id: predicted[row.job_id]
            for row in rows
            if row.state in UNANSWERED and row.job_id in predicted
        },
        low=min(values, default=0.0),
        top=max(values, default=0.0),
        log=uneven(values),
    )


def _ordered(table: Table, axis: int) -> tuple[str, ...]:
    """Sort precisions from wide to narrow, sizes by number, others by highest throughput."""
    fastest: dict[str, float] = {}
    for cell, row in table.cells.items():
        fastest[cell[axis]] = max(fastest.get(cell[axis], 0.0), row.metrics.throughput or 0.0)
    name = (table.line_name, table.column_name)[axis]
    if name == PRECISION:
        return tuple(sorted(fastest, key=precision_rank))
    if name == BATCH or all(map(str.isdecimal, fastest)):
        numbers = sorted(filter(str.isdecimal, fastest), key=int)
        return (*numbers, *sorted(fastest.keys() - set(numbers)))
    return tuple(sorted(fastest, key=fastest.__getitem__, reverse=True))
