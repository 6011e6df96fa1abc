"""Predicted figures of cells that were not measured. Never rows: they stand in a file of their own
(``store/history.py``), win nothing and are compared with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One figure of one cell. Field order is the order of the columns."""

    job_id: str  # of the cell's first replicate
    label: str  # of the cell among those of its grid
    workload: str
    model: str
    dataset: str
    accelerator: str
    cards: int
    precision: str
    batch_size: str
    engine: str
    figure: str  # such as throughput
    value: float  # median of what a measurement is expected to give
    low: float  # 95 % of measurements are expected between low and high
    high: float
    log_deviation: float  # standard deviation of the natural log of a measurement
    runs: float  # probability that the cell can be measured at all
    measured: int  # cells of the same run that it rests on
    earlier: int  # cells of other runs that it rests on
    basis: str  # the same in words, with the prior

    @property
    def plus_minus(self) -> float:
        """Half of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value
