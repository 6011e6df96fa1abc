"""Laws of the surrogate, its prior means and the scores of cells."""

from __future__ import annotations

from math import exp
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.search.roofline import PARAMETERS, Mean, Roofline
from orchestrator.search.search import (
    Metric,
    Search,
    expected_area_gain,
    expected_improvement,
)
from orchestrator.search.space import Role, Space
from orchestrator.search.surrogate import Belief, Surrogate
from workloads.util.statistics import pareto

ROLES = {
    "cards": Role.CARDS,
    "in": Role.INPUT,
    "out": Role.OUTPUT,
    "load": Role.LOAD,
    "threads": Role.SIZE,
    "engine": Role.CATEGORY,
}
GRID: list[dict[str, Any]] = [
    {"cards": cards, "in": tokens, "out": 128, "load": load, "threads": 2, "engine": engine}
    for cards in (1, 4)
    for tokens in (128, 8192)
    for load in (1, 8, 64, 512)
    for engine in ("a", "b")
]
SPACE = Space(GRID, ROLES)
EVERY = np.arange(SPACE.size)


@pytest.mark.parametrize(
    "mean",
    [Roofline(SPACE), Roofline(SPACE, rate=True), Roofline(SPACE, rate=True, per_card=True)],
    ids=["time", "rate", "rate per card"],
)
def test_slopes_of_the_roofline_are_its_derivatives(mean: Mean) -> None:
    _, slopes = mean.linear(mean.start, EVERY)
    for at, name in enumerate(PARAMETERS):
        step = np.zeros(len(PARAMETERS))
        step[at] = 1e-5
        above, below = (mean.linear(mean.start + way * step, EVERY)[0] for way in (1, -1))
        assert np.allclose(slopes[:, at], (above - below) / 2e-5, atol=1e-6), name


def test_the_roofline_has_the_shape_of_the_hardware() -> None:
    times = np.exp(Roofline(SPACE).linear(Roofline(SPACE).start, EVERY)[0])
    rates = np.exp(Roofline(SPACE, rate=True).linear(Roofline(SPACE).start, EVERY)[0])
    for row, cell in enumerate(GRID):
        for other, larger in enumerate(GRID):
            if larger == {**cell, "load": larger["load"]} and larger["load"] > cell["load"]:
                assert times[other] > times[row] and rates[other] > rates[row]
            if larger == {**cell, "in": 8192} and cell["in"] == 128:
                assert times[other] > times[row]


def test_a_measured_cell_is_nearly_known() -> None:
    rows = [0, 5, 11, 18, 26]
    logs = Roofline(SPACE).linear(Roofline(SPACE).start + 0.5, EVERY)[0]
    surrogate = Surrogate(SPACE, Roofline(SPACE))
    before, after = surrogate.prior(EVERY), surrogate.fit(rows, logs[rows], EVERY)
    assert np.abs(after.mean - logs)[rows].max() < 0.05
    assert (after.deviation <= before.deviation).all()
    assert after.deviation[rows].max() < 0.2 * before.deviation.min()


def test_intervals_cover_draws_from_the_noise() -> None:
    inside, random = [], np.random.default_rng(3)
    truth = Roofline(SPACE).linear(Roofline(SPACE).start, EVERY)[0]
    for _ in range(40):
        logs = truth + random.normal(0, 0.03, SPACE.size)
        rows = random.permutation(SPACE.size)[:12]
        belief = Surrogate(SPACE, Roofline(SPACE)).fit(rows, logs[rows], EVERY)
        others = np.setdiff1d(EVERY, rows)
        inside.append(np.abs(belief.mean - logs)[others] < 1.96 * belief.deviation[others])
    assert 0.92 < np.mean(inside) < 0.995


def test_cells_are_looked_at_in_blocks_with_the_same_beliefs() -> None:
    grid = [{**cell, "load": load} for cell in GRID for load in range(1, 41)]
    space, random = Space(grid, ROLES), np.random.default_rng(1)
    every, rows = np.arange(space.size), np.sort(random.permutation(space.size)[:120])
    logs = Roofline(space).linear(Roofline(space).start, rows)[0] + random.normal(0, 0.03, 120)
    few = Surrogate(space, Roofline(space)).fit(rows, logs, [7, 500])
    many = Surrogate(space, Roofline(space)).fit(rows, logs, every)
    assert np.allclose(few.mean, many.mean[[7, 500]])
    assert np.allclose(few.deviation, many.deviation[[7, 500]])


@given(st.floats(-1, 1), st.floats(0.05, 0.9), st.floats(-1, 1))
def test_expected_improvement_is_that_of_many_draws(
    middle: float, deviation: float, best: float
) -> None:
    draws = np.exp(middle + deviation * np.random.default_rng(0).normal(size=20_000))
    drawn = np.maximum(draws - exp(best), 0).mean() / exp(best)
    belief = Belief(np.array([middle]), np.array([deviation]))
    assert expected_improvement(belief, best)[0] == pytest.approx(drawn, rel=0.1, abs=0.01)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), max_size=6))
def test_an_area_grows_only_beyond_the_front(points: list[tuple[float, float]]) -> None:
    known = [(0.0, 1.0), (1.0, 0.0), *points]
    sure = np.array([1e-9])
    for x, y in pareto(known, lambda point: point):
        inside = Belief(np.array([x - 0.1]), sure), Belief(np.array([y - 0.1]), sure)
        assert expected_area_gain(*inside, known)[0] == pytest.approx(0.0, abs=1e-6)
        beyond = Belief(np.array([x + 0.1]), sure), Belief(np.array([y + 0.1]), sure)
        assert expected_area_gain(*beyond, known)[0] >= 0.01 - 1e-6


def test_settings_without_numbers_are_categories() -> None:
    cells: list[dict[str, Any]] = [
        {"size": 1, "steps": None},
        {"size": 2, "steps": 5},
        {"size": 0, "steps": 5},
    ]
    space = Space(cells, {"size": Role.SIZE, "steps": Role.SIZE})
    assert space.categories == 1
    assert space.mismatches([0], [1, 2]).tolist() == [[1.0, 1.0]]
    assert space.squared_distances("layout", [0], [1])[0, 0] > 0


@pytest.mark.parametrize("seed", range(4))
def test_precisions_are_compared_at_the_best_load_where_rates_fall_beyond_it(seed: int) -> None:
    """Each is measured once before any is twice, and the fastest of 60 cells is known by 20."""
    loads, factors = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (1.0, 0.6, 1.3, 0.8, 2.0, 0.4)
    cells = [{"load": load, "engine": str(factor)} for factor in factors for load in loads]
    space = Space(cells, {"load": Role.LOAD, "engine": Role.CATEGORY})
    rate = {
        row: float(cell["engine"]) * 10 * int(cell["load"]) / (1 + (int(cell["load"]) / 9) ** 3)
        for row, cell in enumerate(cells)
    }
    search = Search(space, Metric("rate", Roofline(space, rate=True)), seed=seed)
    tried = []
    while len(tried) < 20:
        tried += search.propose()
        search.measured(tried[-1], {"rate": rate[tried[-1]]})
    assert {cells[row]["engine"] for row in tried[: len(factors)]} == set(map(str, factors))
    assert max(rate[row] for row in tried) == max(rate.values())
