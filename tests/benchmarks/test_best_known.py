"""The search for a short schedule: legal, never worse than where it began, right where one can
try all orders."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.best_known import shortest
from benchmarks.placement import bound, makespan

JOBS = st.lists(
    st.tuples(st.sampled_from([1, 2, 4]), st.floats(1.0, 100.0)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(JOBS)
def test_a_schedule_found_is_between_the_bound_and_first_fit(jobs: list[tuple[int, float]]) -> None:
    found = shortest(jobs, 2, 4, tries=60)
    assert found >= bound(jobs, 8) * (1 - 1e-9)
    for key in (lambda job: -job[1], lambda job: (-job[0], -job[1])):
        assert found <= makespan(sorted(jobs, key=key), 2, 4, "first fit") * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 9)), min_size=2, max_size=5))
def test_a_long_search_finds_the_best_of_all_orders(jobs: list[tuple[int, int]]) -> None:
    every = (makespan(list(order), 1, 2, "fifo") for order in permutations(jobs))
    assert shortest(jobs, 1, 2, tries=3000, least=bound(jobs, 2)) <= min(every)


def test_a_search_replays() -> None:
    jobs = [(1 + at % 3, 10.0 + at * 7 % 13) for at in range(20)]
    assert shortest(jobs, 2, 4, tries=200, seed=3) == shortest(jobs, 2, 4, tries=200, seed=3)
