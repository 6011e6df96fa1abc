"""The raw samples of a row, counted once for all checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.domain.measurement import Measurement
from orchestrator.domain.repeats import Totals, complete_of, repeats_of, totals_of
from workloads.api import Item, Sample

#: Figures that were computed from the same numbers differ by rounding only.
ROUNDING = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount:
    """Sums over the samples of a row."""

    timed: tuple[Sample, ...]  # of all ranks, warm-up left out
    whole: Totals  # of all timed samples
    repeats: tuple[Totals, ...]  # complete ones
    counted: tuple[Sample, ...]  # of the complete repeats; of all, where there are none
    last: tuple[Sample, ...]  # of the repeat that the items are of
    trains: bool
    items: tuple[Item, ...]

    @property
    def rated(self) -> tuple[Totals, ...]:
        """The parts that rates are computed from."""
        return self.repeats or (self.whole,)


#: A row -> what of its plain columns cannot be true.
Check = Callable[[Measurement], str | None]
#: A row and its recount -> what cannot be true.
RawCheck = Callable[[Measurement, Recount], str | None]


def recount(row: Measurement) -> Recount | None:
    """The recount of a row; None where it has no timed samples."""
    timed = [(rank, sample) for rank, sample in row.samples if not sample.warmup]
    if not timed:
        return None
    groups = repeats_of(timed)
    complete = complete_of(groups)
    last = max(complete or groups)
    counted = [pair for pairs in complete.values() for pair in pairs] or timed
    return Recount(
        timed=tuple(sample for _, sample in timed),
        whole=totals_of(timed),
        repeats=tuple(map(totals_of, complete.values())),
        counted=tuple(sample for _, sample in counted),
        last=tuple(sample for _, sample in groups[last]),
        trains=any(sample.loss is not None for _, sample in counted),
        items=tuple(item for _, item in row.items),
    )


def near(value: float, other: float, tolerance: float = ROUNDING) -> bool:
    """Return whether two numbers are equal but for rounding; NaN equals itself."""
    return math.isclose(value, other, rel_tol=tolerance, abs_tol=1e-9) or (
        math.isnan(value) and math.isnan(other)
    )
