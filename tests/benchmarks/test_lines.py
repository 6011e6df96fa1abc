"""Lines of benchmarks follow from turns, attempts and past runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.contender import ROOT
from benchmarks.estimates import FILES, NOTHING_KNOWN, PARTLY_MEASURED, SAME_GRID, cases
from benchmarks.grid import OUTPUT_TOKENS, Turn, line_of_cells, ratios_of_cells
from benchmarks.measuring import lines_of
from benchmarks.past_runs import runs_in


def test_cells_stand_side_by_side_and_together() -> None:
    ours = Turn(took_s=9.0, cells={"fp32 × 1": (1.0, 2.0, 9.0), "bf16 × 4": (4.0, 4.0, 4.0)})
    theirs = Turn(took_s=9.0, cells={"fp32 × 1": (1.0, 1.0, 1.0), "bf16 × 4": (2.0, 4.0, 4.0)})
    together = line_of_cells(ours, theirs, "peer")
    assert together.ours[0] == OUTPUT_TOKENS / 2.0 and together.theirs[0] == OUTPUT_TOKENS / 1.0
    assert together.ratios == (0.5, 1.0) and together.met is None  # two cells settle nothing
    assert ratios_of_cells(ours, theirs) == {"fp32 × 1": 0.5, "bf16 × 4": 1.0}


SHARE = "in the grid, a warm worker, as a share of the script's speed"
SCRIPT: dict[str, float] = {
    "tokens_per_s": 1.0,
    "tokens_per_cpu_s": 1.0,
    "load_s": 1.0,
    "peak_mib": 1.0,
}


@pytest.mark.parametrize(
    ("jobs", "warm", "fresh", "met"),
    [
        (6, 1.0, 1.0, True),
        (6, 0.95, 0.95, True),  # both lose alike
        (6, 0.95, 1.0, False),
        (5, 1.0, 1.0, None),  # too few for an interval
    ],
)
def test_warm_and_fresh_workers_are_compared_by_an_interval(jobs, warm, fresh, met) -> None:
    attempts: list[dict[str, float | None]] = [
        {**SCRIPT, "start_s": start_s, "tokens_per_s": speed}
        for start_s, speed in [(1.0, fresh), (None, warm)] * jobs
    ]
    found = lines_of(attempts, [SCRIPT] * (2 * jobs + 1), 1.0)
    assert {line.what: line.met for line in found}[SHARE] is met


def test_nine_of_ten_promises_hold_and_they_are_about_the_runs() -> None:
    runs = [run for file in FILES for run in runs_in(ROOT / file)]
    found = cases(runs)
    assert len(runs) > 40 and len(found) > 80
    for knowledge in (NOTHING_KNOWN, PARTLY_MEASURED, SAME_GRID):
        held = [case.held for case in found if case.knowledge == knowledge]
        assert sum(held) >= 0.9 * len(held) > 9
    slower = [replace(case, took_s=10 * case.took_s) for case in found]
    assert sum(case.held for case in slower) < 0.5 * len(found)
