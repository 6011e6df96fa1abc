"""The sum of contenders' turns: medians, ratios and their spread. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, stdev
from typing import Any, Literal

#: Standard error of a median over that of a mean, where values are about normal.
_OF_MEDIAN = math.sqrt(math.pi / 2)


def _left_out(many: int) -> int | None:
    """Of so many ratios, those at each end that the 95 % interval of their median leaves out."""
    beyond = 0.0  # the chance that the median lies beyond the ends
    left_out = None
    for below in range((many + 1) // 2):
        beyond += 2 * math.comb(many, below) / 2**many
        if beyond > 0.05:
            break
        left_out = below
    return left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal for the ratio of a line; ``shown`` for one that is only to be seen."""

    kind: Literal["at least", "at most", "within", "shown"] = "shown"
    value: float = 0.0

    def met(self, ratio: float, interval: tuple[float, float] | None = None) -> bool | None:
        """Return whether a ratio reaches it; None where there is no goal, or where nobody can say.

        ``within`` is a distance from 1, which takes an interval to claim: yes where all of it lies
        within, no where all of it lies without.
        """
        if self.kind == "at least":
            return ratio >= self.value
        if self.kind == "at most":
            return ratio <= self.value
        if self.kind == "within" and interval is not None:
            low, high = (end - 1 for end in interval)
            if -self.value <= low and high <= self.value:
                return True
            return False if low > self.value or high < -self.value else None
        return None

    def __str__(self) -> str:
        if self.kind == "shown":
            return "shown"
        if self.kind == "within":
            return f"± {self.value:.0%}"
        return f"{'≥' if self.kind == 'at least' else '≤'} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table: what we did in each turn, what the other did in the same turn.

    ``theirs`` is empty for a figure of our own, whose goal is then for the figure itself.
    """

    what: str
    against: str
    unit: str  # of the values
    ours: tuple[float, ...]
    theirs: tuple[float, ...] = ()
    goal: Goal = Goal()
    cpu_ratio: float | None = None  # of the same work by CPU time, which a busy machine leaves be
    note: str = ""

    def __post_init__(self) -> None:
        if not self.ours or (self.theirs and len(self.ours) != len(self.theirs)):
            raise ValueError(f"{self.what}: {len(self.ours)} turns beside {len(self.theirs)}")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours over theirs, turn by turn; our own figures where nobody stands beside us."""
        if not self.theirs:
            return self.ours
        return tuple(ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio(self) -> float:
        """The median of ``ratios``."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the greatest ratio."""
        return min(self.ratios), max(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median ratio, whatever its distribution: between the order
        statistics that a binomial law puts around it. None for fewer than six turns."""
        ordered = sorted(self.ratios)
        left_out = _left_out(len(ordered))
        return None if left_out is None else (ordered[left_out], ordered[-1 - left_out])

    @property
    def clear(self) -> bool:
        """Return whether the interval, or where there is none every turn, says of the goal what
        the median says."""
        ends = self.interval or self.spread
        return len({self.goal.met(end, (end, end)) for end in (*ends, self.ratio)}) == 1

    @property
    def turns_needed(self) -> int | None:
        """About how many turns would settle a goal that these do not settle, by the scatter of the
        logarithms of their ratios; None where no number of turns can be told."""
        nearer = self.goal.value - abs(self.ratio - 1)
        if self.goal.kind != "within" or self.met is not None or len(self.ratios) < 6:
            return None
        if nearer <= 0:
            return None
        error = _OF_MEDIAN * stdev(map(math.log, self.ratios))  # of one turn
        return math.ceil((1.96 * error / nearer) ** 2)

    @property
    def met(self) -> bool | None:
        """Return whether the goal is reached."""
        return self.goal.met(self.ratio, self.interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The findings of one benchmark: its lines, and what must be known to read them."""

    name: str
    title: str
    about: str  # how it compares, in Markdown
    lines: tuple[Line, ...]
    facts: Mapping[str, Any]  # sizes, versions, memory, equality of outputs
    took_s: float
    smoke: bool = False
    quick: bool = False
    others: float = 0.0  # cores that other programs used in the second before or after, the more
    stolen: float = 0.0  # share of the time wanted of the cores that other machines had instead

    def to_json(self) -> dict[str, Any]:
        """Plain values, with what follows from them."""
        lines = [
            asdict(line)
            | {"ratio": line.ratio, "spread": line.spread, "interval": line.interval}
            | {"met": line.met, "clear": line.clear, "goal": str(line.goal)}
            | {"turns_needed": line.turns_needed}
            for line in self.lines
        ]
        return asdict(self) | {"lines": lines, "facts": dict(self.facts)}


def rates(turns: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Work per second of each turn."""
    return tuple(float(turn["work"]) / float(turn["wall_s"]) for turn in turns)


def values(turns: Sequence[Mapping[str, Any]], name: str) -> tuple[float, ...]:
    """One figure of each turn."""
    return tuple(float(turn[name]) for turn in turns)


def cpu_ratio(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> float | None:
    """The median ratio of work per CPU second; None where CPU time is not known."""
    if any(turn.get("cpu_s") is None for turn in (*ours, *theirs)):
        return None
    pairs = zip(ours, theirs, strict=True)
    return median((a["work"] / a["cpu_s"]) / (b["work"] / b["cpu_s"]) for a, b in pairs)


def distances(
    mine: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> tuple[float, ...]:
    """The greatest distance of any step's loss, turn by turn."""
    return tuple(
        max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))
        for one, other in zip(mine, others, strict=True)
    )
