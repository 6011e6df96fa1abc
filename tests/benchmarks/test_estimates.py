"""The replay of past runs: promises hold nine times of ten, and the count can fail."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contender import ROOT
from benchmarks.estimates import FILES, NOTHING_KNOWN, PARTLY_MEASURED, SAME_GRID, cases
from benchmarks.past_runs import runs_in


def test_nine_of_ten_promises_hold_and_they_are_about_the_runs() -> None:
    runs = [run for file in FILES for run in runs_in(ROOT / file)]
    found = cases(runs)
    assert len(runs) > 40 and len(found) > 80
    for knowledge in (NOTHING_KNOWN, PARTLY_MEASURED, SAME_GRID):
        held = [case.held for case in found if case.knowledge == knowledge]
        assert sum(held) >= 0.9 * len(held) > 9
    slower = [replace(case, took_s=10 * case.took_s) for case in found]
    assert sum(case.held for case in slower) < 0.5 * len(found)
