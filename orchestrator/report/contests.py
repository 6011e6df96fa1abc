"""Contests between settings: the best one, and the confidence in it.

A contest is held among rows that did the same work on the same device: they agree in every setting
whose role is ``work``, and differ in choices (precision, batch size, engine, attention, …) and in
what changes nothing that is measured (``workloads/settings.py``). A row whose confidence interval
overlaps another's has not beaten it; such rows are tied, and the report says so instead of ranking
noise. Where the interval of the first or of the second is not known, nobody has won.

Throughput decides, of which more is better. Beside it stands the best row by every figure of the
workload that declares which way is better (``workloads/bench/metrics.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from math import isfinite
from typing import Any

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.settings import FIELDS
from orchestrator.report.grouping import Setting
from orchestrator.report.reported import figure_of, same
from workloads import registry
from workloads.base import Metric

#: Fields of a ``Setting`` that a job's own settings leave free.
_FREE_FIELDS = tuple(
    field.name
    for field in fields(Setting)
    if field.name in FIELDS and FIELDS[field.name].role != "work"
)


class Verdict(str, Enum):
    """Standing of the fastest row."""

    CLEAR_WINNER = "clear winner"  # its interval lies above the second's
    TIED = "tied"  # its interval overlaps another's
    NOT_KNOWN = "not known"  # it or the second has no interval
    ALONE = "alone"  # there is no second


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The best row of a contest by one figure of its workload."""

    metric: Metric
    row: Measurement
    value: float
    tied: int  # other rows that have as much of it

    @property
    def title(self) -> str:
        """``best loss after``."""
        return f"best {self.metric.title}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The best rows for one piece of work on one device."""

    setting: Setting  # engine and isolation are blank: they are free to choose
    unit: str
    ranked: tuple[Measurement, ...]  # succeeded rows, the fastest first
    tied: tuple[Measurement, ...]  # whose interval overlaps the fastest's, best first
    verdict: Verdict
    quickest: Measurement | None = None  # lowest median latency of a prompt
    leanest: Measurement | None = None  # smallest peak memory
    thriftiest: Measurement | None = None  # most work per joule, of those whose energy is known
    leaders: tuple[Leader, ...] = ()  # by the workload's own figures, in order of declaration

    @property
    def fastest(self) -> Measurement:
        """The row with the highest throughput."""
        return self.ranked[0]

    @property
    def contenders(self) -> int:
        """Number of rows that were ranked."""
        return len(self.ranked)

    @property
    def winner(self) -> Measurement | None:
        """The row that has beaten all others."""
        return self.fastest if self.verdict is Verdict.CLEAR_WINNER else None

    @property
    def first(self) -> tuple[Measurement, ...]:
        """The rows that share the first place."""
        return (self.fastest, *self.tied) if self.verdict is Verdict.TIED else ()


def hold_contests(
    rows: Sequence[Measurement], settings: Mapping[str, Setting], *, brief: bool = False
) -> tuple[Contest, ...]:
    """One contest for each piece of work that has a succeeded row with a throughput.

    Args:
        rows: one a job.
        settings: of the rows, by job id.
        brief: by throughput alone, without the best rows by other figures.
    """
    entered: dict[tuple[Setting, str], list[Measurement]] = {}
    works = Works(settings)
    for row in rows:
        if row.state is State.SUCCEEDED and row.metrics.throughput is not None:
            key = (works[row], row.metrics.throughput_unit)
            entered.setdefault(key, []).append(row)
    judge = _ranked if brief else _judge
    return tuple(judge(setting, unit, group) for (setting, unit), group in entered.items())


class Works:
    """The work of each row (``work_of``), worked out once for each setting: a few serve all."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._settings = settings
        self._known: dict[Setting, Setting] = {}

    def __getitem__(self, row: Measurement) -> Setting:
        setting = self._settings[row.job_id]
        work = self._known.get(setting)
        if work is None:
            work = self._known[setting] = work_of(setting)
        return work


def interval(row: Measurement) -> tuple[float, float]:
    """The confidence interval of the throughput; a point where there is none."""
    value = row.metrics.throughput or 0.0
    low, high = row.metrics.throughput_low, row.metrics.throughput_high
    return (value if low is None else low, value if high is None else high)


def peak_memory_bytes(row: Measurement) -> int | None:
    """Peak memory of the device; on a device without its own, what the host's grew by."""
    if row.peak_device_memory_bytes:
        return row.peak_device_memory_bytes
    if row.peak_host_memory_bytes is None:
        return None
    return max(0, row.peak_host_memory_bytes - (row.baseline_host_memory_bytes or 0))


def memory_kind(row: Measurement) -> str:
    """Kind of memory that ``peak_memory_bytes`` is about: ``device`` or ``host``."""
    return "device" if row.peak_device_memory_bytes else "host"


def work_of(setting: Setting) -> Setting:
    """The setting without what is free to choose: rows that agree in it did the same work. What
    nobody here declares is a part of it."""
    declared = registry.declared_in_rows(setting.workload, setting.engine)
    parameters = tuple(
        pair
        for pair in setting.parameters
        if pair[0] not in declared or declared[pair[0]].role == "work"
    )
    blank: dict[str, Any] = dict.fromkeys(_FREE_FIELDS, "")
    return replace(setting, parameters=parameters, **blank)


def _ranked(setting: Setting, unit: str, rows: list[Measurement]) -> Contest:
    ranked = sorted(rows, key=lambda row: row.metrics.throughput or 0.0, reverse=True)
    verdict, tied = _verdict(ranked)
    return Contest(setting=setting, unit=unit, ranked=tuple(ranked), tied=tied, verdict=verdict)


def _judge(setting: Setting, unit: str, rows: list[Measurement]) -> Contest:
    timed = [row for row in rows if row.metrics.latency_p50_s is not None]
    weighed = [row for row in rows if peak_memory_bytes(row) is not None]
    metered = [row for row in rows if row.metrics.work_per_joule is not None]
    return replace(
        _ranked(setting, unit, rows),
        quickest=min(timed, key=lambda row: row.metrics.latency_p50_s or 0.0, default=None),
        leanest=min(weighed, key=lambda row: peak_memory_bytes(row) or 0, default=None),
        thriftiest=max(metered, key=lambda row: row.metrics.work_per_joule or 0.0, default=None),
        leaders=tuple(_leaders(setting.workload, rows)),
    )


def _verdict(ranked: Sequence[Measurement]) -> tuple[Verdict, tuple[Measurement, ...]]:
    """Compare intervals: the verdict, and the rows that tie with the fastest, best first."""
    fastest, *others = ranked
    if not others:
        return Verdict.ALONE, ()
    if any(row.metrics.throughput_low is None for row in (fastest, others[0])):
        return Verdict.NOT_KNOWN, ()
    floor = interval(fastest)[0]
    tied = tuple(row for row in others if interval(row)[1] >= floor)
    return (Verdict.TIED if tied else Verdict.CLEAR_WINNER), tied


def _leaders(workload: str, rows: Sequence[Measurement]) -> Iterator[Leader]:
    """The best row by each figure that has a better way, and of which some row has less."""
    declared = registry.metrics_of(workload)
    raw = any(row.samples for row in rows)  # of which figures may be derived
    told_of = {name for row in rows for name in (*row.workload_metrics, *row.details)}
    for metric in declared.values():
        if metric.better is None or not (raw or metric.name in told_of):
            continue
        figures = ((figure_of(row, metric.name, declared), row) for row in rows)
        told = [(value, row) for value, row in figures if value is not None and isfinite(value)]
        if len(told) < 2:
            continue
        pick = min if metric.better == "lower" else max
        value, row = pick(told, key=lambda pair: pair[0])
        alike = sum(same(value, other) for other, _ in told)
        if alike < len(told):
            yield Leader(metric=metric, row=row, value=value, tied=alike - 1)
