"""Grids for nights of faults: mostly jobs that work, some that go wrong of themselves."""

from __future__ import annotations

import random


def chaos_grid(*, seed: int, single: int, pairs: int, nodes: int, seconds: tuple[int, int]) -> str:
    """A grid file with ``single`` jobs of one card, ``pairs`` of two cards, ``nodes`` of eight,
    each working for some seconds in the given range; and 13 that do not work, of each kind. Those
    that hang come first: each takes two patient waits, in which the others are done."""
    random_ = random.Random(seed)

    def lengths(count: int) -> str:
        return f"[{', '.join(str(random_.randint(*seconds)) for _ in range(count))}]"

    def numbers(count: int, first: int) -> str:
        return f"[{', '.join(str(first + number) for number in range(count))}]"

    def working(name: str, count: int, cards: int, first: int) -> str:
        return f"""\
  - name: {name}
    cards: {cards}
    zip: {{seconds: {lengths(count)}, number: {numbers(count, first)}}}
"""

    return f"""\
name: night
defaults:
  workload: chaos
  model: tiny-chatglm3
  accelerator: HPU
  precision: fp32
  batch_size: 1
measure: {{warmup: 0, min_repeats: 1, max_repeats: 1, time_limit_s: 3600}}
experiments:
  - name: poison
    axes:
      behaviour: [segfault, abort, allocate, hold-gil, hang, stubborn, raise]
{working("single", single, 1, 0)}\
{working("pairs", pairs, 2, 1000)}\
{working("whole nodes", nodes, 8, 2000)}\
  - name: too large at last
    behaviour: grow
    seconds: 2.0
    axes: {{batch_size: [1, 2, 4, 8, 16, 32]}}
"""


def jobs_of(*, single: int, pairs: int, nodes: int) -> int:
    """Count the jobs of such a grid."""
    return single + pairs + nodes + 7 + 6
