"""Measured against published: others' figures and ours in neighbouring rows, never mixed.

A row of ours stands beside a published figure when it is the same task, model, precision, batch
size per card, number of cards and, where the figure names some, settings. The device may differ:
that is the question. Rows of emulated cards never stand there. The speed-ups are those of the
published comparison: over Gaudi1 and over the A100, at the same precision and batch size where the
source has such figures, else best against best, which is said. Nothing is compared with a figure
that is doubtful.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TypeAlias

from orchestrator.core.job import Scalar, State
from orchestrator.core.measurement import Measurement
from orchestrator.report.grouping import scalar
from orchestrator.report.reference_data import Published, reference
from orchestrator.report.roofline import sheet_of
from orchestrator.report.units import number, seconds, times
from workloads.data.records import ENDINGS

#: Published task -> workloads of ours that do it.
TASKS: dict[str, frozenset[str]] = {
    "pretraining": frozenset({"pretraining"}),
    "text-to-image": frozenset({"text-to-image"}),
    "summarization-finetuning": frozenset({"finetuning"}),
    "text-generation": frozenset({"text-generation"}),
    "causal-lm-finetuning": frozenset({"finetuning"}),
}

#: Rows by batch size per card and number of cards.
BySize: TypeAlias = "dict[tuple[int | None, int], list[Measurement]]"

#: Devices over which the published comparison gives its speed-ups.
REFERENCES = ("Gaudi1", "A100-80GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure, published or ours (then ``row`` is set), with its speed-ups by device."""

    figure: Published  # of ours: the figure it matched, with its own device and value
    row: Measurement | None
    speedups: dict[str, float]
    #: Of these devices there is no figure at the same batch size: each did its best.
    best_against_best: frozenset[str] = frozenset()

    @property
    def ours(self) -> bool:
        """Return whether this run measured it."""
        return self.row is not None

    def speedup(self, device: str) -> str:
        """The speed-up over a device as text."""
        text = times(self.speedups.get(device))
        return f"{text} best against best" if device in self.best_against_best else text

    @property
    def training(self) -> str:
        """The steps that were trained and their time; of ours, the time they would take."""
        figure = self.figure
        if figure.steps is None or not self.ours:
            return f"{figure.steps:,} in {figure.time}" if figure.steps else ""
        samples = figure.steps * figure.batch_size * figure.cards
        return f"{figure.steps:,} would take {seconds(samples / figure.value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One task: the published lines in their order, each followed by those of ours that match."""

    task: str
    model: str
    dataset: str
    cards: int
    unit: str
    lower_is_better: bool
    lines: tuple[Line, ...]
    emulated: int  # rows of ours that would match if they had not been emulated

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the sources on single figures."""
        figures = [line.figure for line in self.lines]
        return tuple(dict.fromkeys(f"{one.title}: {one.note}" for one in figures if one.note))

    @property
    def measured(self) -> bool:
        """Return whether any line is ours."""
        return any(line.ours for line in self.lines)


def against_published(
    rows: Sequence[Measurement], published: Sequence[Published]
) -> tuple[Comparison, ...]:
    """One comparison for each task of the published figures, whether we measured it or not."""
    groups: dict[tuple[str, str, str, int], list[Published]] = {}
    for figure in published:
        key = (figure.task, figure.model, figure.dataset, figure.cards)
        groups.setdefault(key, []).append(figure)
    alike = _by_size(rows)
    return tuple(_comparison(group, alike) for group in groups.values())


def _by_size(rows: Sequence[Measurement]) -> BySize:
    """The succeeded rows by what a figure is compared by first: a large run has few rows of the
    sizes of a figure."""
    found: BySize = {}
    for row in rows:
        if row.state is State.SUCCEEDED:
            found.setdefault((row.batch_size, row.cards), []).append(row)
    return found


def matches(row: Measurement, figure: Published) -> bool:
    """Return whether the row did what the figure is about, on whatever device."""
    return (
        row.workload in TASKS.get(figure.task, frozenset())
        and any(same_model(row.model, name) for name in (figure.model, *figure.also))
        and (not figure.dataset or _plain(_last_part(row.dataset)) == _plain(figure.dataset))
        and same_precision(row, figure.precision)
        and row.batch_size == figure.batch_size
        and row.cards == figure.cards
        and all(_plain_value(row.parameters.get(name)) in same for name, same in figure.settings)
    )


#: Share of what others publish for the same card below which a figure is doubted.
DOUBTED_SHARE = 0.5


def far_below(rows: Sequence[Measurement], published: Sequence[Published]) -> dict[str, str]:
    """The rows that reach less than half of what is published for the very same card, by job id,
    each with a sentence: a mode or a library is not what it should be, or another job was there."""
    sheets = reference().devices
    found = {}
    for row in rows:
        if row.state is not State.SUCCEEDED or row.emulated or not row.device_name:
            continue
        sheet = sheet_of(row.device_name, sheets)
        for figure in published if sheet is not None else ():
            if sheet is None or figure.device != sheet.device or not matches(row, figure):
                continue
            value = _value(row, figure)
            if value is not None and speedup(figure.metric, value, figure.value) < DOUBTED_SHARE:
                found[row.job_id] = (
                    f"{figure.model} {figure.precision} b={figure.batch_size} on {figure.device} "
                    f"({row.engine}): {number(value)} {figure.unit}, published are "
                    f"{number(figure.value)}: {figure.source}"
                )
    return found


def same_model(ours: str, theirs: str) -> bool:
    """Return whether two names mean one model: the owner or the directories before the last slash
    do not count, nor does the case."""
    return _plain(ours.rstrip("/").rsplit("/", 1)[-1]) == _plain(theirs)


def same_precision(row: Measurement, precision: str) -> bool:
    """Return whether the row computed as published; ``bf16-mixed`` is fp32 weights under
    autocast."""
    autocast = str(row.parameters.get("autocast") or "none")
    base, _, mixed = precision.partition("-")
    if mixed == "mixed":
        return row.precision == precision or (row.precision == "fp32" and autocast == base)
    return row.precision == precision and autocast in ("none", precision)


def speedup(metric: str, value: float, reference: float) -> float:
    """Ratio by which ``value`` is faster than ``reference``; of latencies less is faster."""
    return reference / value if metric == "latency" else value / reference


def _comparison(figures: Sequence[Published], rows: BySize) -> Comparison:
    first = figures[0]
    lines: list[Line] = []
    emulated: set[str] = set()
    seen: set[str] = set()
    for figure in figures:
        lines.append(_line(figure, None, figures))
    for figure in figures:
        for row in rows.get((figure.batch_size, figure.cards), ()):
            if row.job_id in seen or not matches(row, figure):
                continue
            if row.emulated:
                emulated.add(row.job_id)
                continue
            value = _value(row, figure)
            if value is None:
                continue
            seen.add(row.job_id)
            lines.append(_line(_as_published(row, figure, value), row, figures))
    return Comparison(
        task=first.task,
        model=first.model,
        dataset=first.dataset,
        cards=first.cards,
        unit=first.unit,
        lower_is_better=first.metric == "latency",
        lines=tuple(lines),
        emulated=len(emulated),
    )


def _line(figure: Published, row: Measurement | None, published: Sequence[Published]) -> Line:
    """A figure with its speed-up over each reference device: over its figure at the same precision
    and batch size, else at the same batch size, else over its best."""
    found, unlike = {}, set()
    for device in REFERENCES:
        candidates = [f for f in published if f.device == device and not f.doubtful]
        if not candidates or figure.doubtful or figure.device == device:
            continue
        reference = max(candidates, key=lambda other: _likeness(other, figure))
        found[device] = speedup(figure.metric, figure.value, reference.value)
        if reference.batch_size != figure.batch_size:
            unlike.add(device)
    return Line(figure=figure, row=row, speedups=found, best_against_best=frozenset(unlike))


def _likeness(other: Published, figure: Published) -> tuple[bool, bool, float]:
    """Order of the figures to compare with, the last of which is taken."""
    fast = 1 / other.value if other.metric == "latency" else other.value
    return other.batch_size == figure.batch_size, other.precision == figure.precision, fast


def _value(row: Measurement, figure: Published) -> float | None:
    """Our figure in the published unit."""
    rate = row.metrics.items_per_s
    if figure.unit == "tokens/s":
        return row.metrics.generated_tokens_per_s
    if rate is None or not math.isfinite(rate) or rate <= 0:
        return None
    if figure.unit == "samples/s":
        return rate
    return row.cards / rate if figure.unit == "s/image" else None


def _as_published(row: Measurement, figure: Published, value: float) -> Published:
    return Published(
        task=figure.task,
        model=row.model,
        dataset=row.dataset,
        device=row.device_name or str(row.accelerator),
        cards=row.cards,
        batch_size=figure.batch_size,
        precision=figure.precision,
        settings=figure.settings,
        steps=figure.steps,
        metric=figure.metric,
        value=value,
        unit=figure.unit,
        note="",
        source="this run",
    )


def _plain_value(value: Scalar) -> str:
    return "null" if value is None else scalar(value)


def _last_part(dataset: str) -> str:
    """The last part of a path or a hub id, without the ending of a data file."""
    path = PurePosixPath(dataset)
    return path.stem if path.suffix in ENDINGS else path.name


@lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
