"""The plan of faults: enough of each kind, spread over the night, the same for the same seed."""

from __future__ import annotations

import itertools

import pytest
from chaos_plan import KINDS, counts, plan
from chaos_tables import PAGE, kinds_table, with_tables
from hypothesis import given
from hypothesis import strategies as st

subsets = st.sets(st.sampled_from(sorted(KINDS)), min_size=1)


@given(
    seed=st.integers(0, 2**32),
    seconds=st.floats(60, 8 * 3600),
    every_s=st.floats(5, 120),
    least=st.integers(1, 8),
    kinds=subsets,
)
def test_a_plan_has_enough_of_each_kind_in_time_and_order(
    seed: int, seconds: float, every_s: float, least: int, kinds: set[str]
) -> None:
    """At least so many of each, heavy ones exactly; none outside of the night; sorted; the same
    whatever the order in which the kinds are named."""
    planned = plan(seed, seconds, every_s, least=least, kinds=kinds)
    found = counts(planned)
    assert found.keys() == kinds
    assert all(count >= least for count in found.values())
    assert all(found[kind] == least for kind in kinds if KINDS[kind].heavy)
    times = [at for at, _ in planned]
    assert times == sorted(times) and times[0] > 0 and times[-1] < seconds
    light = {kind for kind in kinds if not KINDS[kind].heavy}
    assert len(planned) == max(round(seconds / every_s) if light else 0, least * len(kinds))
    assert plan(seed, seconds, every_s, least=least, kinds=sorted(kinds, reverse=True)) == planned


@given(seed=st.integers(0, 2**32), least=st.integers(1, 8), kinds=subsets)
def test_no_fault_comes_upon_another_of_its_weight(seed: int, least: int, kinds: set[str]) -> None:
    """Heavy ones are at least 0.8 of their slot apart, all others 0.2 of theirs."""
    planned = plan(seed, 3600, 24, least=least, kinds=kinds)
    for heavy, share in ((True, 0.8), (False, 0.2)):
        times = [at for at, kind in planned if KINDS[kind].heavy is heavy]
        slot = 3600 / max(1, len(times))
        assert all(b - a >= share * slot - 1e-6 for a, b in itertools.pairwise(times))


def test_the_full_rehearsal_has_what_was_asked_for() -> None:
    """150 faults of 14 kinds, five of each; another seed is another night."""
    from rehearsal import EVERY_S, FAULTS_UNTIL, LEAST, MINUTES

    planned = plan(20261121, MINUTES * 60 * FAULTS_UNTIL, EVERY_S, least=LEAST)
    found = counts(planned)
    assert sum(found.values()) >= 150 and len(found) >= 14 and min(found.values()) >= 5
    heavy = [at for at, kind in planned if KINDS[kind].heavy]
    assert min(b - a for a, b in itertools.pairwise(heavy)) > 75
    assert plan(1, 3000, 20, least=5) != plan(2, 3000, 20, least=5)


def test_a_plan_that_cannot_be_is_refused() -> None:
    """An unknown kind, or no time."""
    with pytest.raises(ValueError, match="unplug it"):
        plan(1, 60, 10, kinds=["unplug it"])
    with pytest.raises(ValueError, match="seconds=0"):
        plan(1, 0, 10)


def test_the_page_lists_the_kinds_that_there_are() -> None:
    """`python tests/chaos/chaos_tables.py` writes them."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, {"kinds": kinds_table()}) == page


def test_a_table_goes_to_its_place_and_nowhere_else() -> None:
    """What was there goes; a page without the place is refused."""
    page = "a\n<!-- x: of y -->\nold\n<!-- /x -->\nb\n"
    assert with_tables(page, {"x": "| 1 |\n"}) == ("a\n<!-- x: of y -->\n| 1 |\n<!-- /x -->\nb\n")
    with pytest.raises(ValueError, match="0 places for the table 'z'"):
        with_tables(page, {"z": ""})
