"""A long search for a short schedule, which knows every job's true duration before it begins.

A schedule is an order of jobs: each starts as early as it can on the cards that are free then, of
the node where that is earliest. The search begins with jobs as first fit starts them, from the
longest or the widest on, and changes the better order: it moves a job, or swaps two, most often one
of those that end last, and keeps what is no worse. Nobody can schedule so in earnest, for durations
are known afterwards; it tells how much shorter a run could have been.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.placement import starts

#: Cards and seconds of a job.
Sized = tuple[int, float]

_FIRST: tuple[Callable[[Sized], tuple[float, ...]], ...] = (
    lambda job: (-job[1],),
    lambda job: (-job[0], -job[1]),
)


def shortest(
    jobs: Sequence[Sized], nodes: int, cards: int, *, tries: int, least: float = 0.0, seed: int = 0
) -> float:
    """The makespan of the shortest schedule found, in seconds.

    Args:
        jobs: cards and true seconds of each; all cards of a job are on one node.
        nodes: how many there are.
        cards: of each node.
        tries: orders that are tried, which bound the time of the search.
        least: seconds that no schedule can beat; the search ends when it is there.
        seed: of what is drawn.
    """
    chance = random.Random(seed)
    orders = [_first_fit(jobs, nodes, cards, key) for key in _FIRST]
    tried = [(_played(jobs, order, nodes, cards), order) for order in orders]
    (best, ends), order = min(tried, key=lambda each: each[0][0])
    for _ in range(tries - len(tried)):
        if best[0] <= least:
            break
        changed = _changed(order, ends, chance)
        found, found_ends = _played(jobs, changed, nodes, cards)
        if found <= best:
            best, ends, order = found, found_ends, changed
    return best[0]


def _first_fit(
    jobs: Sequence[Sized], nodes: int, cards: int, key: Callable[[Sized], tuple[float, ...]]
) -> list[int]:
    """Jobs in the order in which first fit starts them, given them in the order of ``key``."""
    queue = sorted(range(len(jobs)), key=lambda at: key(jobs[at]))
    began = starts([jobs[at] for at in queue], nodes, cards, "first fit")
    return [at for _, at in sorted(zip(began, queue, strict=True), key=lambda each: each[0])]


def _changed(order: list[int], ends: Sequence[float], chance: random.Random) -> list[int]:
    """The order with one job moved or two swapped; ``ends`` are those of jobs in this order."""
    many = len(order)
    if chance.random() < 0.7:  # one of those that end last
        taken = max(chance.sample(range(many), min(8, many)), key=ends.__getitem__)
    else:
        taken = chance.randrange(many)
    other = chance.randrange(many)
    changed = list(order)
    if chance.random() < 0.5:
        changed[taken], changed[other] = changed[other], changed[taken]
    else:
        changed.insert(other, changed.pop(taken))
    return changed


def _played(
    jobs: Sequence[Sized], order: Sequence[int], nodes: int, cards: int
) -> tuple[tuple[float, float], list[float]]:
    """Makespan, and the sum of squares of the ends of all cards, which tells orders apart that end
    alike; then the end of each job in this order."""
    free = [[0.0] * cards for _ in range(nodes)]  # of each card, ascending
    ends: list[float] = []
    for at in order:
        needed, seconds = jobs[at]
        last = needed - 1
        # Of nodes on which it would start at once, the one whose cards would idle least.
        node = min(free, key=lambda ready: (ready[last], -ready[0]))
        end = node[last] + seconds
        node[:needed] = [end] * needed
        node.sort()
        ends.append(end)
    return (max(ends), sum(end * end for node in free for end in node)), ends
