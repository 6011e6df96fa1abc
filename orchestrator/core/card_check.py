"""Checks of cards' speed, and which of them are slow, beside the other cards of their node (one
that was always slow) and their own earlier checks (a node that has become slower). Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from workloads.util.statistics import Spread

#: Shares of the usual figure below which a card is slow; emulated cards share caches and clock.
LEAST_SHARE, LEAST_SHARE_EMULATED = 0.9, 0.5
#: Fewest earlier checks for which a card's history counts.
LEAST_HISTORY = 3

#: The figures, and their names for people.
FIGURES = {
    "matmul_flops": "matrix product",
    "copy_bytes_per_s": "memory copy",
    "link_bytes_per_s": "all-reduce",
    "clock_mhz": "clock",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardCheck:
    """The figures of a card at one moment; None where one was not measured."""

    run: str
    taken_at: float  # seconds since the epoch
    node: str
    card_index: int
    accelerator: str
    device_name: str
    emulated: bool
    threads: int | None = None  # that computed, where they are the host's
    matmul_flops: float | None = None
    copy_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    clock_mhz: float | None = None

    @property
    def card(self) -> str:
        """The card as people know it, e.g. ``hpu-1/HPU3``."""
        return f"{self.node}/{self.accelerator}{self.card_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCard:
    """A card that is slower than it should be, by one of its figures."""

    card: str
    figure: str  # of ``FIGURES``
    share: float  # of what is usual
    than: str  # "the other cards of its node" or "before"
    since: float = -math.inf  # seconds since the epoch: the check that was slow
    until: float = math.inf  # and the card's next one, if any

    def __str__(self) -> str:
        return f"{self.card}: {FIGURES[self.figure]} at {self.share:.0%} of {self.than}"


def slow_cards(now: Sequence[CardCheck], before: Iterable[CardCheck] = ()) -> tuple[SlowCard, ...]:
    """Slow cards of a run, each by its worst figure, slowest first; ``now`` are checks of one run
    (a card's newest counts), ``before`` of earlier runs."""
    return tuple(one for one in slow_checks(now, before) if one.until == math.inf)


def slow_checks(now: Sequence[CardCheck], before: Iterable[CardCheck] = ()) -> tuple[SlowCard, ...]:
    """The same of all checks of a run, which has more than one of a card if it was resumed.

    A check is held against its neighbours' checks that are nearest in time: those of its own
    invocation, if they have any.
    """
    checks: dict[str, list[CardCheck]] = {}
    for check in sorted(now, key=lambda check: check.taken_at):
        own = checks.setdefault(check.card, [])
        older = own[-1] if own else check  # whose figures fill those that are not known
        lacking = [name for name in FIGURES if getattr(check, name) is None]
        own.append(replace(check, **{name: getattr(older, name) for name in lacking}))
    earlier: dict[str, list[CardCheck]] = {}
    for check in before:
        earlier.setdefault(check.card, []).append(check)
    worst = []
    for card, own in checks.items():
        others = [one for other, one in checks.items() if other != card]
        neighbours = [one for one in others if one[0].node == own[0].node]
        for check, until in zip(own, [*(one.taken_at for one in own[1:]), math.inf], strict=True):
            peers = [
                min(one, key=lambda other: abs(other.taken_at - check.taken_at))
                for one in neighbours
            ]
            slow = [
                one
                for figure in FIGURES
                for group, than, least in (
                    (peers, "the other cards of its node", 1),
                    (earlier.get(card, []), "what it had in earlier runs", LEAST_HISTORY),
                )
                if (one := _slow(check, figure, group, than, least)) is not None
            ]
            if slow:
                one = min(slow, key=lambda one: one.share)
                worst.append(replace(one, since=check.taken_at, until=until))
    return tuple(sorted(worst, key=lambda slow: slow.share))


def spread_of_runs(checks: Iterable[CardCheck]) -> Spread:
    """Spread of card speed from run to run, by the figure that varies most.

    A run's speed is the median over its cards of figure over the card's own mean, so neither other
    cards nor one slow card count as a difference between runs. Cards with fewer than
    ``LEAST_HISTORY`` runs are left out: a single run equals its mean and would show no spread.
    """
    alike: dict[object, list[CardCheck]] = {}
    for check in checks:
        alike.setdefault((check.card, check.device_name, check.threads), []).append(check)
    spreads = [Spread()]
    for figure in FIGURES:
        deviations: dict[str, list[float]] = {}  # of each card from its own mean, by run
        for own in alike.values():
            by_run: dict[str, list[float]] = {}
            for check in own:
                if (value := getattr(check, figure)) is not None and value > 0:
                    by_run.setdefault(check.run, []).append(math.log(value))
            if len(by_run) < LEAST_HISTORY:
                continue
            means = {run: statistics.fmean(values) for run, values in by_run.items()}
            for run, mean in means.items():
                deviations.setdefault(run, []).append(mean - statistics.fmean(means.values()))
        if deviations:
            speeds = [statistics.median(means) for means in deviations.values()]
            spreads.append(Spread(deviation=statistics.stdev(speeds), values=len(speeds)))
    return max(spreads, key=lambda spread: spread.deviation)


def _slow(
    card: CardCheck, figure: str, others: Sequence[CardCheck], than: str, least: int
) -> SlowCard | None:
    """The card, if one figure is low beside others of the same product and thread count."""
    value: float | None = getattr(card, figure)
    alike = [
        other
        for other in others
        if (other.device_name, other.threads) == (card.device_name, card.threads)
    ]
    known = [v for other in alike if (v := getattr(other, figure)) is not None]
    if value is None or len(known) < least:
        return None
    usual = statistics.median(known)
    limit = LEAST_SHARE_EMULATED if card.emulated else LEAST_SHARE
    if usual <= 0 or value >= limit * usual:
        return None
    return SlowCard(card=card.card, figure=figure, share=value / usual, than=than)
