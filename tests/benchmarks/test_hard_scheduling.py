"""The schedule where it is hard: five jobs a card."""

from __future__ import annotations

from statistics import mean

from benchmarks.hard_scheduling import simulated


def test_wrong_estimates_cost_little() -> None:
    """Durations off by a lognormal factor of sigma 1 cost 9 % over the bound, where all wide jobs
    before all narrow ones cost 29 %."""
    turns = [simulated(4, 1.0, seed, tries=1) for seed in range(4)]
    assert mean(turn.ours / turn.bound for turn in turns) <= 1.15
