"""The cost of a job that does nothing: no-op jobs on emulated cards.

*Nightgrid* is the real schedule, driver, store and Ray executor with workers that are processes
beneath their actors, as always; every job gets its durable row. Its workers run nothing and import
no torch; *real workers* are the product's own, which put their process in order before each job of
a workload that does nothing. *ActorPool* is the least that anybody could write: as many Ray actors,
warm, each given the next job when it is done; nothing is written, nothing can fail. *Four actors*
are given eight jobs a call, the most that Ray carried here. *Tune* and *hydra* run the same nothing
as trials, in Tune's quickest setting, and as jobs of a sweep.

Warm stands beside warm: jobs/s after as many jobs as there are workers; a job of Nightgrid counts
when its row is safe. Cold stands beside cold: from nothing, with the start of Ray and of the
workers, to the last result.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, rates, values
from benchmarks.setting import Setting

TITLE = "Orchestration: jobs that do nothing, 4 × 8 emulated cards"
_FAST_TURNS = 6
ALL = 1_000_000  # actors: as many as there are cards
_SHOWN = Goal()
_OURS, _REAL = "nightgrid", "nightgrid, real workers"


@dataclass(frozen=True, slots=True)
class Peer:
    """A contender beside ours: its program, and the goals for warm and for cold."""

    program: str
    arguments: tuple[int, ...] = ()
    jobs: int | None = None  # fewer than ours, where it is slow
    fast: bool = False  # takes turns with ours, beside which it stands
    warm: Goal | None = _SHOWN  # None: it is never warm


PEERS = {
    "ActorPool of warm actors": Peer(
        "noop_pool.py", (ALL, 1), fast=True, warm=Goal(kind="at least", value=1.5)
    ),
    "four warm actors, eight jobs a call": Peer("noop_pool.py", (4, 8), fast=True),
    "Ray Tune, class, reuse_actors": Peer(
        "noop_tune.py", jobs=300, warm=Goal(kind="at least", value=10.0)
    ),
    "hydra-ray-launcher": Peer("noop_hydra.py", jobs=16, warm=None),
}


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    jobs, nodes, cards = setting.sized((1000, 4, 8), (400, 4, 8), (12, 1, 2))
    programs: dict[str, tuple[str, str, tuple[object, ...]]] = {}
    for name, kind in ((_OURS, "noop"), (_REAL, "real")):
        programs[name] = (sys.executable, "noop_nightgrid.py", (jobs, kind))
    for name, peer in PEERS.items():
        if peer.fast or setting.peers_python is not None:
            python = sys.executable if peer.fast else setting.peer
            count = jobs if peer.jobs is None else min(jobs, peer.jobs)
            programs[name] = (python, peer.program, (count, *peer.arguments))
    fast = [name for name in programs if name == _OURS or (name in PEERS and PEERS[name].fast)]
    turns: dict[str, list[dict[str, Any]]] = {}
    # The fast ones stand side by side, each with a cluster of its own, for the cores' speed changes
    # within seconds; of the others one turn tells enough.
    for together in (fast, *([name] for name in programs if name not in fast)):
        with contextlib.ExitStack() as stack:
            started = []
            for name in together:
                python, program, (count, *more) = programs[name]
                arguments = (count, nodes, cards, setting.scratch, *more)
                started.append(setting.started(stack, name, python, program, *arguments))
            many = _FAST_TURNS if together is fast else 1
            turns |= setting.turns_of(started, turns=many)
    return _lines(turns), {
        "jobs": {name: count for name, (_, _, (count, *_)) in programs.items()},
        "nodes": nodes,
        "cards of each": cards,
        "rows in a file": values(turns[_OURS], "rows_per_file")[0],
    }


def _lines(turns: dict[str, list[dict[str, Any]]]) -> list[Line]:
    ours, real = turns[_OURS], turns[_REAL]
    lines = [
        Line(
            what="jobs/s, warm",
            against=name,
            unit="jobs/s",
            ours=rates(ours[: len(turns[name])]),
            theirs=rates(turns[name]),
            goal=peer.warm,
            cpu_ratio=cpu_ratio(ours, turns[name]) if peer.fast else None,
            note="CPU: of the driver" if peer.fast else "",
        )
        for name, peer in PEERS.items()
        if name in turns and peer.warm is not None
    ]
    lines.append(
        Line(
            what="jobs/s, warm, real workers",
            against="",
            unit="jobs/s",
            ours=rates(real),
            goal=Goal(kind="at least", value=2000.0),
        )
    )
    lines += [
        Line(
            what="jobs/s, cold: the start of Ray and of the workers within",
            against=name,
            unit="jobs/s",
            ours=(_cold(ours[0]),),
            theirs=(_cold(turns[name][0]),),
        )
        for name in (_REAL, *PEERS)
        if name in turns
    ]
    lines.append(
        Line(
            what="the driver's CPU time per job",
            against="",
            unit="ms",
            ours=tuple(turn["cpu_s"] / turn["work"] * 1e3 for turn in ours),
        )
    )
    return lines


def _cold(turn: dict[str, Any]) -> float:
    """Jobs per second of a first turn, from nothing."""
    return float(turn["whole_jobs"] / (turn["whole_s"] + turn["cluster_s"]))
