"""The shape of a simulated night, drawn from its seed; what must hold; and what is counted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from orchestrator.core.measurement import Measurement
from orchestrator.scheduler.simulated_faults import Faults

#: A job that is open after so long a virtual time starves.
TOO_LONG_S = 1e5
#: Two failures, then one after each of three quarantines; then it is used no more.
MOST_BAD_STARTS = 5


class Died(BaseException):
    """The driver is no more: it can do nothing, not even tidy up."""


class Broken(BaseException):
    """Something happened that must not. Nothing that is tested gets to handle it."""


def must(holds: bool, message: str) -> None:
    if not holds:
        raise Broken(message)


def is_late(row: Measurement) -> bool:
    """Return whether a row is what a node brought after its attempt had been given up: a second row
    of the attempt, which counts for nothing."""
    return not row.final and row.reason.startswith("came after the attempt was given up")


#: The time of day at which every night begins: Tuesday, 14 November 2023.
EPOCH_S = 1.7e9
#: The longest that a driver may take to see that something is due: it waits 60 s for an event, and
#: when a call fails for a moment it tries again, with pauses of 15 s at most.
NOTICED_S = 150.0
TWO_HOURS_S = 7200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a night, all of it drawn from its seed."""

    seed: int
    on_disk: bool
    jobs: int
    nodes: int
    cards: int
    deaths: tuple[str, ...] = ()  # of drivers, in order: killed, power or frozen
    faults: Faults = field(default_factory=Faults)
    join_at: float | None = None
    full: tuple[float, float] | None = None  # when the disk is full, seconds of the night
    flips: int = 0  # bits, between two drivers
    accidents: bool = False  # whether jobs may fail for other reasons than their cards
    crowded: bool = False  # two gangs need the first of many jobs
    clock_steps: tuple[tuple[float, float], ...] = ()  # when the time of day is set, by how much
    ends_after_s: float | None = None  # by the time of day, or with ``budget`` by seconds that pass
    budget: bool = False
    watched: bool = False  # with a watchdog, and jobs that hang without a word
    flaky: float = 0.0  # how often a call of the executor or the store fails for a moment
    needy: bool = False  # some jobs need others
    broken: bool = False  # no worker ever starts

    @classmethod
    def of(cls, seed: int, *, on_disk: bool) -> Shape:
        """The night of this seed. One in twelve is crowded: gangs may begin only when all cards
        have long been busy, and many jobs wait for each."""
        if seed % 12 == 7 and not on_disk:
            return cls(seed=seed, on_disk=False, jobs=120, nodes=1, cards=8, crowded=True)
        if seed % 24 == 3 and not on_disk:
            faults = Faults(start_failure=1.0)
            broken = cls(seed=seed, on_disk=False, jobs=200, nodes=3, cards=8, faults=faults)
            return dataclasses.replace(broken, accidents=True, broken=True)
        draw = Random(f"night {seed}")
        more = Random(f"more of night {seed}")
        flaky = more.choice([0.0, 0.0, 0.0, 0.01])
        watched = more.random() < 0.4
        ends = more.choice([None, None, None, more.uniform(600, 9000)])
        rate = draw.choice([0.0, 0.0, 0.03, 0.1])
        bad = draw.choice([0.0, 0.0, 0.2])
        losses = sorted(draw.uniform(50, 4000) for _ in range(draw.choice([0, 0, 1, 3, 12])))
        kinds = ["killed", "killed", "power", "frozen"]
        start = draw.uniform(20, 2000)
        return cls(
            seed=seed,
            on_disk=on_disk,
            jobs=draw.randint(4, 14) if on_disk else draw.randint(30, 150),
            nodes=draw.choice([1, 2, 3]),
            cards=draw.choice([2, 8]),
            deaths=tuple(draw.choice(kinds) for _ in range(draw.choice([0, 1, 1, 2, 3]))),
            faults=Faults(
                crash=rate,
                hang=rate / 4,
                error=rate / 2,
                start_failure=rate,
                bad_cards=bad,
                node_losses=tuple(losses),
                rejoin_after_s=draw.choice([30.0, 600.0]),
                no_start=rate / 8,
                stuck=more.choice([rate / 8, rate / 8, 0.03]) if rate else 0.0,
                stuck_s=more.choice([600.0, 600.0, None]),
                poison=more.choice([0.0, rate / 4]),
                late_results=draw.random() < 0.5,
            ),
            join_at=draw.choice([None, 100.0]),
            full=draw.choice([None, None, (start, start + draw.uniform(30, 4000))]),
            flips=draw.choice([0, 0, 2]) if on_disk else 0,
            accidents=rate > 0 or flaky > 0 or watched or ends is not None,
            clock_steps=_clock_steps(more),
            ends_after_s=ends,
            budget=more.random() < 0.5,
            watched=watched,
            flaky=flaky,
            needy=more.random() < 0.3,
        )


def _clock_steps(draw: Random) -> tuple[tuple[float, float], ...]:
    kind = draw.choice(["never", "hours", "little", "often"])
    count = {"never": 0, "hours": 1, "little": 1, "often": 6}[kind]
    sizes = {
        "hours": (TWO_HOURS_S, -TWO_HOURS_S),
        "little": (0.4, -0.4, 3.0, -3.0, 90.0, -90.0),
    }.get(kind, (TWO_HOURS_S, -TWO_HOURS_S, 40.0, -40.0, 0.4, -700.0))
    return tuple(sorted((draw.uniform(0, 4000), draw.choice(sizes)) for _ in range(count)))


@dataclass(slots=True)
class Tally:
    """The sum of a night, or of many."""

    nights: int = 0
    events: int = 0
    commands: int = 0
    drivers: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    faults: int = 0
    refused: int = 0  # second drivers
    paused: int = 0
    late: int = 0
    clock_steps: int = 0  # that a driver was told of
    hung: int = 0  # jobs that hung without a word
    tripped: int = 0  # calls that failed for a moment

    def add(self, other: Tally) -> None:
        for each in dataclasses.fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
