"""Simulated nights: whatever goes wrong, every job ends once and no row is lost."""

from __future__ import annotations

import os

import pytest
from defences import DEFENCES, Defence
from lossy_exchange import run_exchange
from nights import run_night

#: ``NIGHTGRID_SEED=17 pytest tests/night`` looks at other nights.
FIRST = int(os.environ.get("NIGHTGRID_SEED", "0"))


@pytest.mark.slow
def test_nights_with_many_events() -> None:
    """A dozen; `make rehearsal-events` has as many as make a million events."""
    for seed in range(FIRST, FIRST + 12):
        run_night(seed)


@pytest.mark.slow
def test_nights_with_the_real_store_on_a_disk_that_fails() -> None:
    for seed in range(FIRST, FIRST + 2):
        run_night(seed, on_disk=True)


def test_requests_arrive_once_and_in_order_whatever_calls_are_lost() -> None:
    for seed in range(FIRST, FIRST + 50):
        run_exchange(seed)


@pytest.mark.slow
def test_one_seed_is_one_night() -> None:
    assert run_night(17) == run_night(17)
    assert run_night(5, on_disk=True) == run_night(5, on_disk=True)


@pytest.mark.slow
@pytest.mark.parametrize("defence", DEFENCES, ids=lambda defence: defence.name)
def test_no_defence_can_be_taken_away(defence: Defence) -> None:
    """Without it some night breaks, in the way that it is there to prevent."""
    assert defence.is_needed(), f"nothing shows what {defence.name!r} is good for"
