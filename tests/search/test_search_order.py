"""The order in which a search measures, on cells whose true values follow a roofline."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.search.roofline import PARAMETERS, Plane, Roofline
from orchestrator.search.search import LOOKED_AT, Limit, Metric, Search
from orchestrator.search.space import Role, Space

ROLES = {"cards": Role.CARDS, "input": Role.INPUT, "load": Role.LOAD, "engine": Role.CATEGORY}
CELLS: list[dict[str, Any]] = [
    {"cards": cards, "input": tokens, "load": load, "engine": engine}
    for cards, tokens, load, engine in product(
        (1, 2, 4, 8), (1024, 8192), (4, 16, 64, 256), ("one", "other")
    )
]
SPACE = Space(CELLS, ROLES)
#: One engine is slower, and all is different from the priors.
SLOWER = np.array([0.15 if cell["engine"] == "other" else 0.0 for cell in CELLS])
_THERE = np.array([mean for mean, _ in PARAMETERS.values()]) + 0.3
EVERY = np.arange(len(CELLS))
RATES = np.exp(Roofline(SPACE, rate=True, per_card=True).linear(_THERE, EVERY)[0] - SLOWER)
TIMES = np.exp(Roofline(SPACE).linear(_THERE, EVERY)[0] + SLOWER)
LIMIT_S = float(np.median(TIMES))


def a_search(seed: int = 0, *, limited: bool = True, second: bool = False) -> Search:
    rate = Metric("rate", Roofline(SPACE, rate=True, per_card=True))
    seconds = Metric("seconds", Roofline(SPACE), more_is_better=False)
    limits = [Limit(seconds, LIMIT_S, at_most=True)] if limited else []
    return Search(SPACE, rate, limits, seconds if second else None, seed=seed)


def tell(search: Search, row: int) -> None:
    search.measured(row, {"rate": float(RATES[row]), "seconds": float(TIMES[row])})


@pytest.mark.parametrize("seed", range(3))
def test_the_best_under_a_limit_is_among_the_first_eighth(seed: int) -> None:
    search = a_search(seed)
    for _ in range(len(CELLS) // 8):
        (row,) = search.propose()
        tell(search, row)
    answer = search.answer()
    assert answer is not None
    assert TIMES[answer.row] <= LIMIT_S
    assert answer.value >= 0.98 * RATES[TIMES <= LIMIT_S].max()


@given(st.sets(st.integers(0, len(CELLS) - 1), max_size=20), st.integers(1, 9))
def test_proposals_are_new_and_distinct(known: set[int], count: int) -> None:
    search = a_search()
    for at, row in enumerate(sorted(known)):
        if at % 3 == 0:
            search.fails(row)
        elif at % 3 == 1:
            search.running.add(row)
        else:
            tell(search, row)
    rows = search.propose(count)
    assert len(rows) == len(set(rows)) == count
    assert not known & set(rows)


@given(st.permutations([3, 10, 22, 31, 47, 60]), st.integers(0, 5))
def test_the_order_of_measurements_does_not_matter(order: list[int], seed: int) -> None:
    one, other = a_search(seed), a_search(seed)
    for row in order:
        tell(one, row)
    for row in sorted(order):
        tell(other, row)
    assert one.propose(3) == other.propose(3)
    assert one.answer() == other.answer()


def test_the_end_of_a_space_gives_nothing_more() -> None:
    search = a_search()
    for row in range(len(CELLS) - 1):
        tell(search, row)
    assert search.propose(4) == [len(CELLS) - 1]
    tell(search, len(CELLS) - 1)
    assert search.propose(4) == []
    answer = search.answer()
    assert answer is not None
    assert answer.probability == 1.0
    assert answer.row == int(np.where(TIMES <= LIMIT_S, RATES, 0).argmax())


def test_no_answer_while_no_cell_keeps_the_limit() -> None:
    search = a_search()
    tell(search, int(TIMES.argmax()))
    assert search.answer() is None
    assert search.propose()


def test_cells_like_those_that_failed_come_late() -> None:
    search = a_search(limited=False)
    large = [row for row, cell in enumerate(CELLS) if cell["load"] == 256]
    tell(search, 0)
    for row in large[:6]:
        search.fails(row)
    before = a_search(limited=False)
    tell(before, 0)
    assert set(before.propose(4)) & set(large)
    assert len(set(search.propose(4)) & set(large)) < len(set(before.propose(4)) & set(large))


def test_cheap_cells_come_first_among_equals() -> None:
    cells = [{"engine": name} for name in ("a", "b", "c", "d")]
    space = Space(cells, {"engine": Role.CATEGORY})
    search = Search(space, Metric("rate", Plane(space)), cost=lambda rows: 1.0 + (rows != 2))
    search.measured(0, {"rate": 1.0})
    assert search.propose() == [2]


def test_cells_that_are_measured_at_once_lie_apart() -> None:
    """What a cell will show is expected of its neighbours already."""
    cells = [{"load": load} for load in range(1, 101)]
    space = Space(cells, {"load": Role.LOAD})
    search = Search(space, Metric("rate", Plane(space)))
    for row in (0, 40, 99):
        search.measured(row, {"rate": 1.0})
    batch = search.propose(4)
    assert min(b - a for a, b in pairwise(sorted(batch))) > 1
    search.running.add(batch[0])
    assert all(abs(row - batch[0]) > 1 for row in search.propose(3))


def test_a_front_is_refined_at_both_ends() -> None:
    search = a_search(limited=False, second=True)
    for _ in range(16):
        (row,) = search.propose()
        tell(search, row)
    known = list(search.values["rate"])
    assert RATES[known].max() >= 0.98 * RATES.max()
    assert TIMES[known].min() <= 1.02 * TIMES.min()


def test_large_spaces_are_looked_at_in_turn() -> None:
    cells = [{"load": load} for load in range(1, 4 * LOOKED_AT)]
    space = Space(cells, {"load": Role.LOAD})
    search = Search(space, Metric("rate", Plane(space)))
    truth = -0.1 * np.square(np.log(np.arange(1, 4 * LOOKED_AT) / 700))
    for _ in range(25):
        (row,) = search.propose()
        search.measured(row, {"rate": float(np.exp(truth[row]))})
    answer = search.answer()
    assert answer is not None and answer.value > 0.98
