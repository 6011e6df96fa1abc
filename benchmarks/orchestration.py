"""The cost of a job that does nothing: no-op jobs on emulated cards.

*Nightgrid* is the real schedule, driver, store and Ray executor, and every job gets its durable
row, by the product's own workers, which put their process in order before each job. *ActorPool* is
the least that anybody could write: as many warm Ray actors as there are cards, each given the next
job when it is done; nothing is written, nothing can fail. *Four actors* are given eight jobs a
call. Ray Tune runs the same nothing as trials in its quickest setting: a class whose actors are
reused, as many at once as there are cards, no loggers, no checkpoints. Hydra's sweep is one
command, and its jobs are tasks of Ray.

Warm stands beside warm: jobs/s after as many jobs as there are workers, and after a turn that is
not timed (of the pools and of ours); a job of Nightgrid counts when its row is safe. Hydra's
processes start one after the other, some of them within that time, so that line is only to be seen.
Cold stands beside cold: seconds from the start of a command, with the start of Ray and of the
workers, to its end (of Tune: to its last result). Cold, Nightgrid is `nightgrid run` as a user
calls it, with the report that it writes at the end, and runs as many jobs as the others. Cold, each
has the host for itself. No night has jobs that do nothing: the goal is the budget of the driver's
CPU for a job, and the rates are there to be seen.
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
from benchmarks.setting import MANY, Setting, Takes

TITLE = "Orchestration: jobs that do nothing, 4 × 8 emulated cards"
TAKES_S = Takes(whole=260, quick=115)
#: The design's budget of the driver's CPU for a job.
_BUDGET_MS = 5.0
ALL = 1_000_000  # actors: as many as there are cards
_OURS = "nightgrid"
_POOL, _FOUR = "ActorPool of warm actors", "four warm actors, eight jobs a call"
_TUNE, _HYDRA = "Ray Tune, class, reuse_actors", "hydra-ray-launcher"

Turns = Mapping[str, list[dict[str, Any]]]
#: Python, file, jobs, and more arguments.
Program = tuple[str, str, int, tuple[object, ...]]


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    nodes, cards = setting.sized((4, 8), (4, 8), (1, 2))
    jobs, trials, swept, few = setting.sized((1000, 300, 64, 16), (400, 96, 16, 16), (200, 4, 2, 2))
    size = (nodes, cards)
    programs: dict[str, Program] = {
        _OURS: (sys.executable, "noop_nightgrid.py", jobs, ()),
        _POOL: (sys.executable, "noop_pool.py", jobs, (ALL, 1)),
    }
    tune: Program = (setting.peer, "noop_tune.py", trials, ())
    hydra: Program = (setting.peer, "noop_hydra.py", swept, ())
    peers = {} if setting.peers_python is None else {_TUNE: tune, _HYDRA: hydra}
    if setting.quick:  # a cluster less
        turns = beside = _turns(setting, size, programs | {_TUNE: tune}, turns=1)
        cold = {_HYDRA: hydra}
    else:
        programs_of_pools = programs | {_FOUR: (sys.executable, "noop_pool.py", jobs, (4, 8))}
        many = setting.sized(MANY, 1, 1)
        turns = _turns(setting, size, programs_of_pools, turns=many, warm_ups=1)
        ours = {_OURS: programs[_OURS]}
        beside = _turns(setting, size, ours | peers, turns=1) if peers else {}
        cold = {name: (*program[:2], few, ()) for name, program in peers.items()}
    lines = [
        *(_beside(turns, theirs) for theirs in (_POOL, _FOUR) if theirs in turns),
        Line(
            what="the driver's CPU time per job",
            against="",
            unit="ms",
            ours=tuple(turn["cpu_s"] / turn["work"] * 1e3 for turn in turns[_OURS]),
            goal=Goal(kind="at most", value=_BUDGET_MS),
        ),
        *(_beside(beside, name) for name in peers if name in beside),
    ]
    if cold:
        theirs = {
            name: _turns(setting, size, {name: program}, turns=1)[name][0]
            for name, program in cold.items()
        }
        lines += _cold(setting, theirs, nodes * cards + few, size)
    return lines, {
        "jobs": jobs,
        "servers, cards of each": [nodes, cards],
        "jobs of each peer after as many as there are cards": {
            name: beside[name][0]["work"] for name in peers if name in beside
        },
        "rows in a file": values(turns[_OURS], "rows_per_file")[0],
    }


def _turns(
    setting: Setting,
    size: tuple[int, int],
    programs: Mapping[str, Program],
    *,
    turns: int,
    warm_ups: int = 0,
) -> Turns:
    """Turns side by side, each with a cluster of its own, for the cores' speed changes within
    seconds; they start one after the other, since the start is part of what is measured."""
    with contextlib.ExitStack() as stack:
        started = []
        for name, (python, program, jobs, more) in programs.items():
            arguments = (jobs, *size, setting.scratch, *more)
            started.append(setting.started(stack, name, python, program, *arguments))
            started[-1].ready()
        found = setting.turns_of(started, turns=turns, warm_ups=warm_ups)
        return {
            each.name: [told | {"start_s": each.ready()} for told in found[each.name]]
            for each in started
        }


def _beside(turns: Turns, theirs: str) -> Line:
    of_cpu = cpu_ratio(turns[_OURS], turns[theirs])
    return Line(
        what="jobs/s, warm",
        against=theirs,
        unit="jobs/s",
        ours=rates(turns[_OURS]),
        theirs=rates(turns[theirs]),
        cpu_ratio=of_cpu,
        note="CPU: of the driver" if of_cpu else "",
    )


def _cold(
    setting: Setting, theirs: Mapping[str, Mapping[str, Any]], jobs: int, size: tuple[int, int]
) -> list[Line]:
    """Seconds of a whole `nightgrid run` beside those of the others, which ran as many jobs."""
    results = setting.scratch / "cold"
    results.mkdir(exist_ok=True)
    grid = results / "grid.yaml"
    grid.write_text(json.dumps(grid_of(jobs)))  # which is YAML
    setting.say(f"  nightgrid run, {jobs} jobs")
    path = offer_workload(setting.scratch)
    emulate = "x".join(map(str, size))
    took_s, rows = night(grid, "cold", results, emulate=emulate, variables={"PYTHONPATH": path})
    if counts := {len(rows), *(told["whole_jobs"] for told in theirs.values())} - {jobs}:
        raise RuntimeError(f"{counts} jobs beside {jobs} in {results}")
    return [
        Line(
            what=f"{jobs} jobs, cold: `nightgrid run` from its start to its end",
            against=against,
            unit="s",
            ours=(took_s,),
            theirs=(told["start_s"] + told["whole_s"],),
        )
        for against, told in theirs.items()
    ]


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
