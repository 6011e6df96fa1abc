"""Two runs of the demonstration, compared cell by cell."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measurements import row

from benchmarks.emulated import Turn, lines_of
from orchestrator.core.measurement import Measurement, Metrics


def measured(number: int, rate: float, wait_share: float = 0.0) -> Measurement:
    """The row of a cell with a throughput, whose process waited for a processor for a share."""
    made = row(number, processor_wait_share=wait_share, processor_cores=1 - wait_share)
    metrics = Metrics(
        throughput=rate,
        generated_tokens_per_s=rate,
        throughput_unit="tokens/s",
        repeats=3,
        measure_s=2.0,
        cpu_s=2.0 * (1 - wait_share),
    )
    return replace(made, metrics=metrics, samples=(), items=())


def test_cells_are_compared_that_rank_on_both_sides() -> None:
    """Each by its median over turns; a disturbed row is left out, and one that has no other."""
    emulated = [
        Turn(took_s=20.0, rows=(measured(0, 90.0), measured(1, 5.0, 0.9), measured(2, 40.0))),
        Turn(took_s=22.0, rows=(measured(0, 84.0), measured(1, 60.0), measured(2, 1.0, 0.5))),
    ]
    alone = [Turn(took_s=10.0, rows=(measured(0, 100.0), measured(1, 50.0)))] * 2
    together, took, by_cpu, near = lines_of(emulated, alone)
    assert together.ratios == pytest.approx((0.87, 1.2))
    assert took.ours == (20.0, 22.0) and took.theirs == (10.0, 10.0)
    assert by_cpu.ratios == pytest.approx((0.87, 1.1))  # of two turns: 50 and 60 beside 50
    assert near.ours == (1.0,)


def test_without_a_row_that_ranks_the_runs_are_told_all_the_same() -> None:
    """On a machine on which every row was disturbed."""
    busy = [Turn(took_s=20.0, rows=(measured(0, 90.0, 0.5),))]
    took, by_cpu = lines_of(busy, busy)
    assert took.ratio == by_cpu.ratio == 1.0
