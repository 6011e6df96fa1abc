"""Two plain ways of giving cards to jobs, to stand beside the schedule: FIFO and first fit.

*FIFO* starts jobs in their order; one that finds no room holds up all behind it. *First fit* is
the order in which Ray places what waits: whatever is first in the queue and fits somewhere, on the
first node that has room, so that small jobs slip past a large one as long as there are any. Both
are spared what our simulator charges: neither starts processes, loads models nor minds which cards
of a server go together. That flatters them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Literal

Order = Literal["fifo", "first fit"]


def makespan(
    jobs: Sequence[tuple[int, float]],
    nodes: int,
    cards_per_node: int,
    order: Order,
) -> float:
    """Seconds until the last job has ended; arguments as of ``starts``."""
    began = starts(jobs, nodes, cards_per_node, order)
    return max(start + seconds for start, (_, seconds) in zip(began, jobs, strict=True))


def starts(
    jobs: Sequence[tuple[int, float]],
    nodes: int,
    cards_per_node: int,
    order: Order,
) -> list[float]:
    """Seconds after which each job starts.

    Args:
        jobs: cards and seconds of each, in the order of the queue.
        nodes: how many there are.
        cards_per_node: a job needs all of its cards on one node.
        order: how the next job is chosen.
    """
    free = [cards_per_node] * nodes
    waiting: dict[int, deque[int]] = {}  # by cards, positions in the queue
    for position, (cards, _) in enumerate(jobs):
        waiting.setdefault(cards, deque()).append(position)
    running: list[tuple[float, int, int]] = []  # end, node, cards
    began = [0.0] * len(jobs)
    now = 0.0
    while waiting or running:
        while (chosen := _choose(waiting, free, order)) is not None:
            position, node = chosen
            cards, seconds = jobs[position]
            waiting[cards].popleft()
            if not waiting[cards]:
                del waiting[cards]
            free[node] -= cards
            began[position] = now
            heapq.heappush(running, (now + seconds, node, cards))
        if not running:
            raise ValueError("a job needs more cards than a node has")
        now, node, cards = heapq.heappop(running)
        free[node] += cards
    return began


def _choose(
    waiting: dict[int, deque[int]], free: Sequence[int], order: str
) -> tuple[int, int] | None:
    most = max(free)
    heads = sorted((queue[0], cards) for cards, queue in waiting.items())
    for position, cards in heads:
        if cards <= most:
            return position, next(n for n, room in enumerate(free) if room >= cards)
        if order == "fifo":
            return None
    return None


def bound(jobs: Sequence[tuple[int, float]], cards: int) -> float:
    """No order is faster: all work over all cards, or the longest job."""
    work = sum(needed * seconds for needed, seconds in jobs)
    return max(work / cards, max(seconds for _, seconds in jobs))
