"""The cost of a job that does nothing: no-op jobs on emulated cards.

*Nightgrid* is the real schedule, driver, store and Ray executor, and every job gets its durable
row. *Real workers* are the product's own, which put their process in order before each job; *bare
workers* run nothing and import no torch, so that they show what the driver alone can do.
*ActorPool* is the least that anybody could write: as many warm Ray actors as there are cards, each
given the next job when it is done; nothing is written, nothing can fail. *Four actors* are given
eight jobs a call. Ray Tune runs the same nothing as trials in its quickest setting: a class whose
actors are reused, as many at once as there are cards, no loggers, no checkpoints.

Warm stands beside warm: jobs/s after as many jobs as there are workers; a job of Nightgrid counts
when its row is safe. Cold stands beside cold: seconds from the start of a command, with the start
of Ray and of the workers, to its end (of Tune: to its last result). Cold, Nightgrid is
`nightgrid run` as a user calls it, with real workers and the report that it writes at the end, and
runs as many jobs as the other. Each has the host for itself.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.contenders.noop_workload import offer_workload
from benchmarks.figures import Goal, Line, cpu_ratio, rates, values
from benchmarks.night import night
from benchmarks.setting import Setting

TITLE = "Orchestration: jobs that do nothing, 4 × 8 emulated cards"
ALL = 1_000_000  # actors: as many as there are cards
_REAL, _BARE = "nightgrid, real workers", "nightgrid, bare workers"
_POOL, _FOUR = "ActorPool of warm actors", "four warm actors, eight jobs a call"
_OURS = (_REAL, _BARE)
_TUNE, _HYDRA = "Ray Tune, class, reuse_actors", "hydra-ray-launcher"

Turns = Mapping[str, list[dict[str, Any]]]


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    nodes, cards = setting.sized((4, 8), (4, 8), (1, 2))
    jobs, trials, swept = setting.sized((1000, 300, 16), (400, 96, 16), (200, 4, 2))
    size = (nodes, cards)
    programs = {
        _REAL: (sys.executable, "noop_nightgrid.py", jobs, ("real",)),
        _POOL: (sys.executable, "noop_pool.py", jobs, (ALL, 1)),
    }
    tune = {_TUNE: (setting.peer, "noop_tune.py", trials, ())}
    hydra = {_HYDRA: (setting.peer, "noop_hydra.py", swept, ())}
    if setting.peers_python is None:
        tune, hydra = {}, {}
    if setting.quick:  # a cluster less
        turns = beside_tune = _turns(setting, size, programs | tune, turns=1)
    else:
        more = {
            _BARE: (sys.executable, "noop_nightgrid.py", jobs, ("noop",)),
            _FOUR: (sys.executable, "noop_pool.py", jobs, (4, 8)),
        }
        turns = _turns(setting, size, programs | more, turns=setting.sized(3, 1, 1))
        beside_tune = (
            _turns(setting, size, {_REAL: programs[_REAL]} | tune, turns=1) if tune else {}
        )
    lines = _lines(turns)
    if tune:
        lines.append(_beside(beside_tune, _REAL, _TUNE, Goal(kind="at least", value=10.0)))
    few = {} if setting.quick else {name: (*tune[name][:2], swept, ()) for name in tune}
    for name, program in (few | hydra).items():  # each alone on the host, and so is ours
        told = _turns(setting, size, {name: program}, turns=1)[name][0]
        lines.append(_cold(setting, name, told, size))
    return lines, {
        "jobs": jobs,
        "servers, cards of each": [nodes, cards],
        "trials of Tune after as many as there are cards": trials,
        "rows in a file": {
            name: values(turns[name], "rows_per_file")[0] for name in _OURS if name in turns
        },
    }


def _turns(
    setting: Setting,
    size: tuple[int, int],
    programs: Mapping[str, tuple[str, str, int, tuple[object, ...]]],
    *,
    turns: int,
) -> Turns:
    """Turns side by side, each with a cluster of its own, for the cores' speed changes within
    seconds; they start one after the other, since the start is part of what is measured."""
    with contextlib.ExitStack() as stack:
        started = []
        for name, (python, program, jobs, more) in programs.items():
            arguments = (jobs, *size, setting.scratch, *more)
            started.append(setting.started(stack, name, python, program, *arguments))
            started[-1].ready()
        found = setting.turns_of(started, turns=turns)
        return {
            each.name: [told | {"start_s": each.ready()} for told in found[each.name]]
            for each in started
        }


def _beside(turns: Turns, ours: str, theirs: str, goal: Goal) -> Line:
    return Line(
        what=f"jobs/s, warm, {ours.partition(', ')[2]}",
        against=theirs,
        unit="jobs/s",
        ours=rates(turns[ours]),
        theirs=rates(turns[theirs]),
        goal=goal,
        cpu_ratio=cpu_ratio(turns[ours], turns[theirs]),
        note="CPU: of the driver",
    )


def _lines(turns: Turns) -> list[Line]:
    lines = [
        _beside(turns, ours, theirs, goal if ours == _REAL else Goal())
        for theirs, goal in ((_POOL, Goal(kind="at least", value=1.5)), (_FOUR, Goal()))
        for ours in _OURS
        if theirs in turns and ours in turns
    ]
    lines.append(
        Line(
            what="jobs/s, warm, real workers",
            against="",
            unit="jobs/s",
            ours=rates(turns[_REAL]),
            goal=Goal(kind="at least", value=2000.0),
        )
    )
    return lines + [
        Line(
            what=f"the driver's CPU time per job, {name.partition(', ')[2]}",
            against="",
            unit="ms",
            ours=tuple(turn["cpu_s"] / turn["work"] * 1e3 for turn in turns[name]),
        )
        for name in _OURS
        if name in turns
    ]


def _cold(setting: Setting, against: str, told: Mapping[str, Any], size: tuple[int, int]) -> Line:
    """Seconds of a whole `nightgrid run` of as many jobs as another had in its first turn."""
    jobs = told["whole_jobs"]
    results = setting.scratch / f"cold-{jobs}"
    results.mkdir(exist_ok=True)
    grid = results / "grid.yaml"
    grid.write_text(json.dumps(grid_of(jobs)))  # which is YAML
    setting.say(f"  nightgrid run, {jobs} jobs")
    path = offer_workload(setting.scratch)
    emulate = "x".join(map(str, size))
    took_s, rows = night(grid, "cold", results, emulate=emulate, variables={"PYTHONPATH": path})
    if len(rows) != jobs:
        raise RuntimeError(f"{len(rows)} rows of {jobs} jobs in {results}")
    return Line(
        what=f"{jobs} jobs, cold: `nightgrid run` from its start to its end",
        against=against,
        unit="s",
        ours=(took_s,),
        theirs=(told["start_s"] + told["whole_s"],),
    )


def grid_of(jobs: int) -> dict[str, Any]:
    """A grid of so many jobs that do nothing."""
    return {
        "name": "cold",
        "experiments": [
            {
                "name": "cold",
                "workload": "noop",
                "model": "tiny-chatglm3",
                "dataset": "english-prompts",
                "precision": "fp32",
                "axes": {"batch_size": list(range(1, jobs + 1))},
            }
        ],
    }
