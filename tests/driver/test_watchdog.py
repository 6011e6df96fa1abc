"""Hung workers are found by phase, on this host's clock, and each is named once."""

from __future__ import annotations

import dataclasses
import math

import pytest
from driver_cases import MOMENT, attempt, job, node
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.events import RunAttempt
from orchestrator.core.status import CardStatus
from orchestrator.driver.watchdog import LIMITS, LONGEST_PAUSE_S, Watchdog

BUSY = CardStatus(card="hpu-1/HPU0", worker_id="w1", phase="load", job="a job", attempt_id="a-1")


def looks(
    watchdog: Watchdog, card: CardStatus, *times: float, since: float | None = None
) -> list[str]:
    """The reasons that came of looking at a card until these times, every few seconds."""
    reasons, last = [], times[0] if since is None else since
    for at in times:
        between = range(math.ceil(last) + 4, math.ceil(at), 4)
        for look in (*between, at):
            reasons += [stop.reason for stop in watchdog.overdue([card], MOMENT + look)]
        last = at
    return reasons


@given(pause=st.floats(LONGEST_PAUSE_S, 1e6), before=st.integers(0, 60), limit=st.floats(20, 600))
def test_a_driver_that_was_halted_does_not_take_its_own_absence_for_a_hang(
    pause: float, before: int, limit: float
) -> None:
    """However long it was away: a pause counts for little, and whoever hangs is found after it."""
    watchdog = Watchdog({"load": limit})
    seen = min(before, limit - LONGEST_PAUSE_S - 1)
    assert looks(watchdog, BUSY, 0, seen) == []
    assert watchdog.overdue([BUSY], MOMENT + seen + pause) == []
    assert looks(watchdog, BUSY, seen + pause + limit + 1, since=seen + pause) != []


@pytest.mark.parametrize("phase", LIMITS)
def test_every_phase_has_a_limit(phase: str) -> None:
    """Just within it nothing happens, beyond it the worker is stopped, once."""
    card = dataclasses.replace(BUSY, phase=phase)
    watchdog = Watchdog()
    assert looks(watchdog, card, 0, LIMITS[phase]) == []
    (reason,) = looks(watchdog, card, LIMITS[phase] + 1, LIMITS[phase] + 2)
    assert f"the limit is {LIMITS[phase]:.0f} s" in reason


@pytest.mark.parametrize("phase", ["idle", "free"])
def test_waiting_is_no_hang(phase: str) -> None:
    """An idle worker may wait for the whole night."""
    assert looks(Watchdog(), dataclasses.replace(BUSY, phase=phase), 0, 100_000) == []


def test_a_new_phase_or_attempt_starts_the_clock_anew() -> None:
    """Whoever gets on is not stopped, however long it all takes."""
    watchdog = Watchdog({"load": 10.0, "warmup": 10.0})
    assert looks(watchdog, BUSY, 0, 9) == []
    assert looks(watchdog, dataclasses.replace(BUSY, phase="warmup"), 11, 20) == []
    assert looks(watchdog, dataclasses.replace(BUSY, attempt_id="a-2"), 22, 31) == []
    assert looks(watchdog, dataclasses.replace(BUSY, attempt_id="a-2"), 33) != []


def test_clocks_of_other_hosts_do_not_matter() -> None:
    """A worker whose host claims that the phase began hours ago is not stopped for it."""
    assert looks(Watchdog(), dataclasses.replace(BUSY, phase_age_s=1e6), 0, 60) == []


def test_the_timed_part_may_take_what_the_grid_asked_for() -> None:
    """A long time limit of a job lengthens the limit of its measuring."""
    long = job(1)
    long = dataclasses.replace(long, measure=dataclasses.replace(long.measure, time_limit_s=7200.0))
    watchdog = Watchdog()
    watchdog.did(RunAttempt(attempt=attempt(long, node().cards[0]), worker_ids=("w1",)))
    measuring = dataclasses.replace(BUSY, phase="measure")
    assert looks(watchdog, measuring, 0, 7200 + 1800) == []
    assert looks(watchdog, measuring, 3 * 7200 + 1800 + 1800 + 1, since=7200 + 1800) != []


@pytest.mark.parametrize(("warmup", "limit"), [(1, LIMITS["warmup"] + 5000), (0, LIMITS["warmup"])])
def test_warm_up_may_take_what_the_grid_allows(warmup: int, limit: float) -> None:
    """A long ``warmup_limit_s`` lengthens the limit of warm-up, where the job has one."""
    one = job(1)
    settings = dataclasses.replace(one.measure, warmup=warmup, warmup_limit_s=5000.0)
    one = dataclasses.replace(one, measure=settings)
    watchdog = Watchdog()
    watchdog.did(RunAttempt(attempt=attempt(one, node().cards[0]), worker_ids=("w1",)))
    warming = dataclasses.replace(BUSY, phase="warmup")
    assert looks(watchdog, warming, 0, limit) == []
    assert looks(watchdog, warming, limit + 1) != []


def test_a_new_worker_on_the_card_is_not_blamed_for_the_old() -> None:
    """Worker ids count, not cards; and what is gone is forgotten."""
    watchdog = Watchdog({"load": 10.0})
    assert len(looks(watchdog, BUSY, 0, 11)) == 1
    assert looks(watchdog, dataclasses.replace(BUSY, worker_id="w2"), 12, 20) == []
    assert looks(watchdog, dataclasses.replace(BUSY, worker_id="w2"), 23) != []
