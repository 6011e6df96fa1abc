"""The cost of a job that does nothing: no-op jobs on emulated cards.

*Nightgrid* is the real schedule, driver, store and Ray executor with workers that are processes
beneath their actors, as always; only what the worker runs is nothing, and it imports no torch.
Every job gets its durable row. *Pool* is the least that anybody could write: as many Ray actors,
warm, each given the next job when it is done; nothing is written, nothing can fail. *Tune* and
*hydra* run the same nothing as trials and as jobs of a sweep.

Jobs/s of Nightgrid and of the pool are those of warm workers, after as many jobs as there are
workers; a job of Nightgrid counts when its row is safe. All of it from the first start to the last
row is told apart. A trial or a sweep's job takes seconds, so *Tune* and *hydra* get few of them.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, rates, values
from benchmarks.setting import Setting

TITLE = "Orchestration: jobs that do nothing, 4 × 8 emulated cards"
_FAST_TURNS = 6


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    jobs, slow_jobs, nodes, cards = (12, 4, 1, 2) if setting.smoke else (1000, 16, 4, 8)
    programs = {
        "nightgrid": (sys.executable, "noop_nightgrid.py", jobs),
        "pool of warm Ray actors": (sys.executable, "noop_pool.py", jobs),
        "Ray Tune, grid_search": (setting.peer, "noop_tune.py", slow_jobs),
        "hydra-ray-launcher": (setting.peer, "noop_hydra.py", slow_jobs),
    }
    if setting.peers_python is None:
        del programs["Ray Tune, grid_search"], programs["hydra-ray-launcher"]
    fast = [name for name, (*_, count) in programs.items() if count == jobs]
    turns: dict[str, list[dict[str, Any]]] = {}
    # These two stand side by side, each with a cluster of its own, for the cores' speed changes
    # within seconds; of those that are hundreds of times slower, one turn tells enough.
    for together in (fast, *([name] for name in programs if name not in fast)):
        with contextlib.ExitStack() as stack:
            started = []
            for name in together:
                python, program, count = programs[name]
                started.append(
                    setting.started(
                        stack, name, python, program, count, nodes, cards, setting.scratch
                    )
                )
            many = _FAST_TURNS if together is fast and not setting.smoke else 1
            turns |= setting.turns_of(started, turns=many)
    ours = turns["nightgrid"]
    whole = [turn | {"wall_s": turn["whole_s"], "work": turn["whole_jobs"]} for turn in ours]
    goals = {
        "pool of warm Ray actors": Goal(kind="at least", value=0.8),
        "Ray Tune, grid_search": Goal(kind="at least", value=10.0),
        "hydra-ray-launcher": Goal(kind="at least", value=10.0),
    }
    lines = [
        Line(
            what=f"jobs/s, {jobs:,} jobs",
            against=name,
            unit="jobs/s",
            ours=rates(ours[: len(theirs)]),
            theirs=rates(theirs),
            goal=goals[name],
            cpu_ratio=cpu_ratio(ours, theirs) if name.startswith("pool") else None,
            note="CPU: of the driver" if name.startswith("pool") else f"{slow_jobs} jobs there",
        )
        for name, theirs in turns.items()
        if name != "nightgrid"
    ]
    lines.append(
        Line(
            what="jobs/s from the beginning to the end, workers' start and last row within",
            against="",
            unit="jobs/s",
            ours=rates(whole),
        )
    )
    lines.append(
        Line(
            what="the driver's CPU time per job",
            against="",
            unit="ms",
            ours=tuple(turn["cpu_s"] / turn["work"] * 1e3 for turn in ours),
        )
    )
    return lines, {
        "jobs": jobs,
        "nodes": nodes,
        "cards of each": cards,
        "rows in a file": values(ours, "rows_per_file")[0],
    }
