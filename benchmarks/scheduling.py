"""The schedule in the simulator: how near to the bound, and what a decision costs.

128 servers of eight cards; jobs of 1, 2, 4 and 8 cards and a dozen models; durations scatter around
their estimates. Beside it two plain orders (``placement.py``) on the same jobs. Each size runs in a
process of its own, so that its time and memory are its own. A million jobs take ten minutes of CPU
and are left to who asks:
``echo turn | PYTHONPATH=. python benchmarks/contenders/simulate_night.py 1000000 128``.
"""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any

from benchmarks.figures import Goal, Line
from benchmarks.placement import bound, makespan
from benchmarks.setting import Setting, Takes

TITLE = "Scheduling, simulated 128 nodes × 8 cards"
TAKES_S = Takes(whole=55, quick=7)
NODES, CARDS, NOISE, MODELS = 128, 8, 0.2, 12


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    sizes = setting.sized((10_000, 100_000), (2_000, 10_000), (200, 400))
    nodes = 4 if setting.smoke else NODES
    main = sizes[-1]
    turns: dict[int, dict[str, Any]] = {}
    for size in sizes:
        with contextlib.ExitStack() as stack:
            started = setting.started(
                stack, f"{size} jobs", sys.executable, "simulate_night.py", size, nodes
            )
            turns[size] = started.turn()
    told = turns[main]
    lines = [
        Line(
            what=f"makespan over the bound, {main:,} jobs",
            against="the bound (work, longest job, starts that gangs must pay)",
            unit="h",
            ours=(told["makespan_s"] / 3600,),
            theirs=(told["bound_s"] / 3600,),
            goal=Goal(kind="at most", value=1.03),
        ),
        Line(
            what=f"makespan over the bound of running alone, {main:,} jobs",
            against="the bound (work, longest job)",
            unit="h",
            ours=(told["makespan_s"] / 3600,),
            theirs=(told["work_bound_s"] / 3600,),
        ),
    ]
    jobs = scattered(main)
    least = bound(jobs, nodes * CARDS)
    for order, name in (("first fit", "Ray's first-fit order"), ("fifo", "FIFO")):
        other = makespan(jobs, nodes, CARDS, order)  # type: ignore[arg-type]
        lines.append(
            Line(
                what="makespan over its bound, ours beside theirs",
                against=f"{name} (no starts, no loading)",
                unit="× the bound",
                ours=(told["makespan_s"] / told["work_bound_s"],),
                theirs=(other / least,),
            )
        )
    small = turns[sizes[0]]
    for size in sizes[1:]:
        lines.append(
            Line(
                what=f"CPU per job, {size:,} jobs",
                against=f"{sizes[0]:,} jobs",
                unit="ms",
                ours=(turns[size]["cpu_s"] / size * 1e3,),
                theirs=(small["cpu_s"] / sizes[0] * 1e3,),
                note=f"{turns[size]['events']:,} events; peak "
                f"{turns[size]['peak_bytes'] / 2**30:.1f} GiB",
            )
        )
    return lines, {"noise (sigma)": NOISE, "nodes": nodes, "cards per node": CARDS}


def shape(number: int) -> tuple[int, int, float]:
    """Cards, model and expected seconds of a job; the same on every machine."""
    chance = random.Random(number)
    return chance.choice([1, 2, 4, 8]), chance.randrange(MODELS), chance.uniform(30.0, 600.0)


def scattered(count: int) -> list[tuple[int, float]]:
    """Cards and actual seconds of the jobs for the plain orders."""
    chance = random.Random(0)
    shapes = map(shape, range(count))
    return [(cards, run_s * chance.lognormvariate(0.0, NOISE)) for cards, _, run_s in shapes]
