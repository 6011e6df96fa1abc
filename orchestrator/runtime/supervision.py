"""Restart policy for a driver that died, with its reasons.

A driver that ends with an exit code of its own has had its say. One that was killed, or that Ray
ended from C++, has not: its rows are safe, its jobs are not done, and the same command goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.exit_codes import INTERRUPTED

#: Drivers in a row that end without having written one row. With the pauses between them these are
#: a quarter of an hour: a head may answer long before its nodes, or this host's own, are back.
FRUITLESS = 10
#: The same where none of them ever held the run: what kills them at their start is no accident.
FRUITLESS_AT_START = 2
#: In all: a night of crashes is one to look at, not to go on with.
MOST = 100
#: The pause before the next driver doubles with each that achieved nothing.
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 300.0
#: For a head to come back, when no deadline says otherwise: a night.
HEAD_PATIENCE_S = 8 * 3600.0
#: With less time than this before the deadline, a driver would do nothing but start and stop.
USELESS_S = 60.0
#: From so many requests on, an end is not an orderly one.
AT_ONCE = 3
_ASKING = (signal.SIGINT, signal.SIGTERM)
#: Exit codes of a driver that was refused (grid, cluster, results): of one that was started again,
#: they say that the cluster or the disk is not back yet, since the first one was not refused.
REFUSED = (2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One driver, from its start to its end."""

    returncode: int  # as ``subprocess`` has it: negative for a signal
    own_end: bool  # whether it said that this is its exit code
    drove: bool = False  # whether it held the run
    wrote_rows: bool = False
    why_again: str = ""  # what it said itself of why another driver should go on

    @property
    def fate(self) -> str:
        """Describe its end, for people."""
        if self.why_again:
            return f"the driver gave up: {self.why_again}"
        if self.own_end:
            return f"the driver was refused (exit code {self.returncode})"
        if self.returncode < 0:
            return f"the driver was killed by {_signal_name(-self.returncode)}"
        return (
            f"the driver ended with {self.returncode} without a word, as Ray ends a process whose "
            "cluster is gone"
        )


@dataclass(frozen=True, slots=True)
class Return:
    """The run is over, with this exit code."""

    code: int


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Another driver goes on after a pause, once the cluster answers."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run ends without its driver's say."""

    code: int
    reason: str


def decide(
    lives: Sequence[Life], *, stops: int, now: float, ends_at: float | None
) -> Return | StartAgain | GiveUp:
    """Decide how to go on now that the last of these drivers has ended.

    Args:
        stops: how often somebody asked for an end (Ctrl-C, SIGTERM).
        now: seconds since the epoch.
        ends_at: when the report must be there, if somebody said so.
    """
    last = lives[-1]
    refused = last.own_end and len(lives) > 1 and last.returncode in REFUSED and not last.drove
    if last.own_end and not last.why_again and not refused:
        return Return(last.returncode)
    code = exit_code(last)
    if stops:
        if -last.returncode in _ASKING:
            return Return(last.returncode)
        if stops >= AT_ONCE or not last.drove:
            return Return(INTERRUPTED)
        return GiveUp(code, "an end was asked for")
    if ends_at is not None and ends_at - now < USELESS_S:
        return GiveUp(code, "the deadline is too near for another one")
    if len(lives) > MOST:
        return GiveUp(code, f"{MOST} drivers were started again, the most that a run gets")
    fruitless = 0
    for life in reversed(lives):
        if life.wrote_rows:
            break
        fruitless += 1
    began = any(life.drove for life in lives)
    if fruitless >= (FRUITLESS if began else FRUITLESS_AT_START):
        return GiveUp(code, f"{fruitless} drivers in a row ended so without writing one row")
    pause_s = FIRST_PAUSE_S * 2 ** max(0, fruitless - 1)
    return StartAgain(pause_s=min(pause_s, LONGEST_PAUSE_S))


def exit_code(life: Life) -> int:
    """The exit code of a run that ends with this driver: its own, that of a shell for a signal, or
    that there is no usable cluster."""
    if life.own_end:
        return life.returncode
    return 128 - life.returncode if life.returncode < 0 else 3


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
