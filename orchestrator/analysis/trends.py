"""Trends of jobs over many nights: where a job's speed changed, and how certain that is.

A night is one invocation of a run, and a job's series is on one device. A change point is the split
whose parts differ most relative to the scatter within rows and between nights (what jobs share left
out); each part is searched again. p-values are multiplied by the number of splits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.analysis import ratio
from orchestrator.analysis.flags import barred, bounded, league_of, raised_on
from orchestrator.core.job import State
from orchestrator.core.labels import labels_of
from orchestrator.core.measurement import Measurement
from workloads.util.statistics import student_t_two_sided

#: False discovery rate of significant changes.
LEVEL = 0.05
#: Relative standard error assumed for a row without an interval.
UNKNOWN_ERROR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One invocation of a run."""

    run: str
    invocation_id: str
    at: float  # time of its first row, seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A job's throughput in one night."""

    night: int  # index among all nights
    value: float
    error: float  # relative standard error, of the row's own repeats
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A change of speed: from point ``at`` on, the job is ``ratio`` times as fast."""

    at: int
    ratio: float
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The series of one job on one device, oldest point first."""

    label: str
    row: Measurement  # the last one
    points: tuple[Point, ...]
    changes: tuple[ChangePoint, ...] = ()

    @property
    def device(self) -> str:
        """Name of the device, else the kind of card."""
        return self.row.device_name or str(self.row.accelerator)

    @property
    def overall(self) -> float:
        """Speed of the last night over the first."""
        return self.points[-1].value / self.points[0].value


@dataclass(frozen=True, slots=True, kw_only=True)
class Trends:
    """All series with at least two points; the largest changes first."""

    nights: tuple[Night, ...]
    trends: tuple[Trend, ...]
    single: int  # jobs measured in one night only
    noise: float  # relative standard deviation between nights, assumed or estimated
    noise_degrees: float = ratio.KNOWN  # of freedom, where it is estimated

    @property
    def changed(self) -> tuple[Trend, ...]:
        """Series with a significant change."""
        return tuple(trend for trend in self.trends if trend.changes)


def trends_of(rows: Iterable[Measurement]) -> Trends:
    """Return the trends of all measured rows, of any runs in any order; samples are not used."""
    begins: dict[tuple[str, str], float] = {}
    candidates: list[tuple[float, Measurement]] = []
    for row in rows:
        at = row.recorded_at or row.ended_at or row.started_at
        if at is None:
            continue
        night = (row.run, row.invocation_id)
        begins[night] = min(at, begins.get(night, at))
        if row.final and row.state is State.SUCCEEDED and ratio.rate_of(row) is not None:
            candidates.append((at, row))
    nights = sorted(begins, key=lambda night: (begins[night], night))
    place = {night: number for number, night in enumerate(nights)}
    newest: dict[tuple[object, ...], dict[int, Measurement]] = {}
    verdicts = raised_on([row for _, row in candidates])
    pairs = zip(candidates, verdicts, strict=True)
    for (_, row), raised in sorted(pairs, key=lambda pair: pair[0][0]):
        if not barred(raised) and not bounded(raised):
            unit = row.metrics.throughput_unit
            league = league_of(row, raised)
            key = (row.job_id, row.device_name, row.emulated, row.batch_size, unit, league)
            newest.setdefault(key, {})[place[row.run, row.invocation_id]] = row
    series = [sorted(group.items()) for group in newest.values()]
    several = [one for one in series if len(one) > 1]
    labels = labels_of(list({one[-1][1].job_id: one[-1][1] for one in several}.values()))
    trends = [_trend(one, str(labels[one[-1][1].job_id])) for one in several]
    noise, degrees = _noise(trends)
    splits = [list(_splits(trend.points, 0, noise, degrees)) for trend in trends]
    p_values = [one.p_value for changes in splits for one in changes]
    sure = iter(ratio.significant(p_values, LEVEL))
    for number, changes in enumerate(splits):
        real = sorted((one for one in changes if next(sure)), key=lambda one: one.at)
        trends[number] = replace(trends[number], changes=tuple(real))

    def size(trend: Trend) -> float:
        return max((abs(math.log(one.ratio)) for one in trend.changes), default=0.0)

    return Trends(
        nights=tuple(Night(run=run, invocation_id=i, at=begins[run, i]) for run, i in nights),
        trends=tuple(sorted(trends, key=lambda trend: (-size(trend), trend.label))),
        single=len(series) - len(several),
        noise=noise,
        noise_degrees=degrees,
    )


def _trend(rows: Sequence[tuple[int, Measurement]], label: str) -> Trend:
    points = []
    for night, row in rows:
        rate = ratio.rate_of(row)
        error = None if rate is None else rate.error
        points.append(
            Point(
                night=night,
                value=row.metrics.throughput or 0.0,
                error=UNKNOWN_ERROR if error is None else error,
                low=row.metrics.throughput_low,
                high=row.metrics.throughput_high,
            )
        )
    return Trend(label=label, row=rows[-1][1], points=tuple(points))


def _noise(trends: Sequence[Trend]) -> tuple[float, float]:
    """Return a night's standard deviation beyond its error (log scale), and degrees of freedom."""
    steps: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for trend in trends:
        for one, other in zip(trend.points, trend.points[1:], strict=False):
            step = math.log(other.value / one.value)
            steps.setdefault((one.night, other.night), []).append(
                (step, one.error**2 + other.error**2)
            )
    left: list[tuple[float, float]] = []
    for pairs in steps.values():
        if len(pairs) >= ratio.ENOUGH_JOBS:  # with fewer, the median is as noisy as the steps
            middle = statistics.median(step for step, _ in pairs)
            left += [(step - middle, error) for step, error in pairs]
    if len(left) < ratio.ENOUGH_JOBS:
        return ratio.ASSUMED_NOISE, ratio.KNOWN
    return ratio.excess_scatter(left, rows=2)


def _splits(
    points: Sequence[Point], start: int, noise: float, degrees: float
) -> Iterator[ChangePoint]:
    """Yield the best split of these points, and those of its parts if it is significant."""
    count = len(points)
    if count < 2:
        return
    logs = [math.log(point.value) for point in points]
    spreads = [point.error**2 + noise**2 for point in points]
    candidates = []
    for at in range(1, count):
        step = statistics.fmean(logs[at:]) - statistics.fmean(logs[:at])
        error = math.sqrt(sum(spreads[:at]) / at**2 + sum(spreads[at:]) / (count - at) ** 2)
        candidates.append((abs(step) / error, at, step))
    distance, at, step = max(candidates, key=lambda candidate: candidate[0])
    p_value = min(1.0, (count - 1) * student_t_two_sided(distance, degrees))
    yield ChangePoint(at=start + at, ratio=math.exp(step), p_value=p_value)
    if p_value <= LEVEL:
        yield from _splits(points[:at], start, noise, degrees)
        yield from _splits(points[at:], start + at, noise, degrees)
