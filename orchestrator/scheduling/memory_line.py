"""Memory of a card as a straight line in the batch size, from what earlier jobs used. Pure.

Weights are there once, and keys, values and activations once for each item of a batch. So the peak
of a job is about ``fixed + per_item * batch size``. Jobs that differ in nothing but the batch size
lie on one line; where only one such job is known, the slope is that of other precisions of the same
work, whose activations are of about the same size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from orchestrator.core.job import Job
from orchestrator.core.outcome import Outcome
from workloads.base import MeasureSettings

#: The share of a card's memory at which the line is read: allocators lose some between blocks.
USABLE = 0.97
_ANY_MEASURE = MeasureSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """A line through known peaks, and the card's memory."""

    fixed: float
    per_item: float  # positive
    limit: float  # bytes of a card

    @property
    def largest(self) -> int:
        """The batch size at which the line meets the usable memory."""
        return max(int((USABLE * self.limit - self.fixed) / self.per_item), 0)


@dataclass(slots=True)
class MemoryBook:
    """Peaks of memory that a run has seen, by configuration and batch size."""

    _peaks: dict[Hashable, dict[int, int]] = field(default_factory=dict)
    _slopes: dict[Hashable, float] = field(default_factory=dict)  # of the newest line of the work
    _limits: dict[Hashable, int] = field(default_factory=dict)  # by kind of card

    def learn(self, job: Job, outcome: Outcome) -> None:
        """Take note of what an attempt at ``job`` used, where its worker says."""
        facts = [memory_of(rank.result) for rank in outcome.ranks if rank.result is not None]
        known = [fact for fact in facts if fact is not None]
        if not known or not isinstance(job.batch_size, int):
            return
        self._limits[job.accelerator] = min(limit for _, limit in known)
        peaks = self._peaks.setdefault(_configuration(job), {})
        peaks[job.batch_size] = max(peak for peak, _ in known)
        if (slope := _slope(peaks)) is not None:
            self._slopes[_work(job)] = slope

    def line(self, job: Job) -> MemoryLine | None:
        """The line of jobs like this; None where too little is known, or memory does not grow."""
        peaks = self._peaks.get(_configuration(job), {})
        limit = self._limits.get(job.accelerator)
        if not peaks or limit is None:
            return None
        slope = _slope(peaks) or self._slopes.get(_work(job))
        if not slope:
            return None
        largest = max(peaks)
        return MemoryLine(
            fixed=peaks[largest] - slope * largest, per_item=slope, limit=float(limit)
        )


def memory_of(result: object) -> tuple[int, int] | None:
    """Peak and limit of a card's memory, in bytes, as a worker tells them; None where it does not.

    An emulated card's limit is on what its process takes beyond its imports.
    """
    details: Mapping[str, str] = getattr(result, "details", {})
    limit = details.get("card_memory_bytes", "")
    peak = getattr(result, "peak_device_memory_bytes", None)
    if peak is None:
        above = getattr(result, "peak_host_memory_bytes", None)
        baseline = getattr(result, "baseline_host_memory_bytes", None)
        peak = None if above is None or baseline is None else above - baseline
    if not limit.isdecimal() or peak is None or peak <= 0:
        return None
    return int(peak), int(limit)


def _slope(peaks: Mapping[int, int]) -> float | None:
    """Bytes of one more item, between the largest size and the next that is at most half of it;
    None where memory does not grow."""
    large = max(peaks)
    small = max((size for size in peaks if 2 * size <= large), default=None)
    if small is None:
        return None
    slope = (peaks[large] - peaks[small]) / (large - small)
    return slope if slope > 0 else None


def _configuration(job: Job) -> Hashable:
    return replace(job, batch_size=1, experiment="", measure=_ANY_MEASURE)


def _work(job: Job) -> Hashable:
    return (job.workload, job.model, job.dataset, job.accelerator, job.cards, job.parameters)
