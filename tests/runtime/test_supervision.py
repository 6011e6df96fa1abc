"""The rules by which a driver that died is started again, each with a case for and against."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.driver.supervisor import (
    FRUITLESS,
    LONGEST_PAUSE_S,
    MOST,
    DriverEnd,
    Finish,
    GiveUp,
    Restart,
    decide,
)

NOW = 1_700_000_000.0
DONE = DriverEnd(returncode=10, reported=True, drove=True, wrote_rows=True)
KILLED = DriverEnd(returncode=-9, reported=False, drove=True, wrote_rows=True)
IDLE = DriverEnd(returncode=1, reported=False, drove=True)
NO_HEAD = DriverEnd(returncode=3, reported=True)
LOST = DriverEnd(
    returncode=3, reported=True, drove=True, restart_reason="the control store is gone"
)


def answer(
    *lives: DriverEnd, stops: int = 0, ends_at: float | None = None
) -> Finish | Restart | GiveUp:
    """The decision after these lives."""
    return decide(lives, stops=stops, now=NOW, ends_at=ends_at)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 10, 130])
def test_a_driver_that_had_its_say_is_believed(code: int) -> None:
    """Its exit code is the run's, also after others died."""
    said = DriverEnd(returncode=code, reported=True, drove=True)
    assert answer(said) == answer(KILLED, said) == Finish(code)


@pytest.mark.parametrize("life", [KILLED, IDLE, LOST])
def test_a_driver_that_died_without_a_word_is_followed_by_another(life: DriverEnd) -> None:
    """Killed, ended by Ray, or given up for want of a cluster that may come back."""
    assert isinstance(answer(life), Restart)


def test_a_refusal_is_final_for_the_first_driver_only() -> None:
    """What was accepted once is refused because the cluster or the disk is not back yet."""
    assert answer(NO_HEAD) == Finish(3)
    assert isinstance(answer(KILLED, NO_HEAD), Restart)


def test_pauses_grow_until_rows_are_written_again() -> None:
    """A head that comes back is found soon, one that does not is not asked all the time."""
    pauses = [answer(*[KILLED] + [IDLE] * n) for n in range(FRUITLESS)]
    seconds = [each.pause_s for each in pauses if isinstance(each, Restart)]
    assert seconds == [2.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, LONGEST_PAUSE_S]
    assert sum(seconds) > 600
    again = answer(KILLED, IDLE, IDLE, KILLED)
    assert again == Restart(pause_s=2.0)


def test_what_dies_again_and_again_without_a_row_is_given_up() -> None:
    """After so many in a row, and never with less."""
    decision = answer(*[IDLE] * FRUITLESS)
    assert isinstance(decision, GiveUp) and decision.code == 3
    assert "without writing one row" in decision.reason


def test_what_dies_at_its_start_is_given_up_soon() -> None:
    """No cluster that comes back would help it."""
    crash = DriverEnd(returncode=-11, reported=False)
    assert isinstance(answer(crash), Restart)
    assert answer(crash, crash) == GiveUp(
        139, "2 drivers in a row ended so without writing one row"
    )


def test_a_run_gets_only_so_many_drivers() -> None:
    """Also when each of them writes rows."""
    assert isinstance(answer(*[KILLED] * MOST), Restart)
    decision = answer(*[KILLED] * (MOST + 1))
    assert isinstance(decision, GiveUp) and decision.code == 137


def test_no_driver_is_started_for_the_last_minute() -> None:
    """It could only start its workers and stop them."""
    assert isinstance(answer(KILLED, ends_at=NOW + 59), GiveUp)
    assert isinstance(answer(KILLED, ends_at=NOW + 61), Restart)


def test_what_was_asked_to_end_is_not_started_again() -> None:
    """Its death is reported if it was at work; a signal that it died of as asked is passed on."""
    assert answer(KILLED, stops=1) == GiveUp(137, "an end was asked for")
    assert answer(DriverEnd(returncode=-15, reported=False), stops=1) == Finish(-15)
    assert answer(KILLED, stops=3) == Finish(130)
    assert answer(DONE, stops=2) == Finish(10)


@given(
    lives=st.lists(st.sampled_from([KILLED, IDLE, NO_HEAD, LOST]), min_size=1, max_size=MOST + 20),
    stops=st.integers(0, 4),
)
def test_the_policy_always_ends(lives: list[DriverEnd], stops: int) -> None:
    """However drivers die: pauses are bounded, and so is the number of drivers."""
    number = 0
    for number in range(1, len(lives) + 1):
        decision = answer(*lives[:number], stops=stops)
        if not isinstance(decision, Restart):
            break
        assert 0 < decision.pause_s <= LONGEST_PAUSE_S
        assert stops == 0
    assert number <= MOST + 1


def test_every_fate_is_said_in_words() -> None:
    """The line on standard error and the notice say what happened."""
    assert KILLED.description == "the driver was killed by SIGKILL"
    assert "as Ray ends a process" in IDLE.description
    assert LOST.description == "the driver gave up: the control store is gone"
    assert NO_HEAD.description == "the driver was refused (exit code 3)"
