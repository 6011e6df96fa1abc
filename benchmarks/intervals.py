"""Does the interval hold when the night is repeated? (``verify-interval``)

A grid of twenty cells is run ten times. A run starts each cell in three fresh processes, and its
95 % interval is made as a report makes it (``orchestrator/analysis/replicates.py``), also by what
the passports of this and earlier runs say of how runs differ. Each run's interval of a cell is then
held against the mean of the other nine: 200 pairs of run and cell. Flagged rows are left out.

The mean of nine is not the truth. It scatters by a third of what one run scatters by, and where
runs scatter alike the distance between the two is wider than that of a run from the truth by the
root of 10/9. So two shares are given: of intervals as they are, which should cover a little less
than 95 %, and of intervals widened by that root, which should cover 95 %. Beside them stands the
interval within one process, as a row of a single process has it. Cells of a run are measured in the
same few minutes, so pairs are not independent, and the share itself is known less well than 200
tosses would give.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.figures import Goal, Line
from benchmarks.night import environment
from benchmarks.setting import Setting, Takes
from orchestrator.analysis.flags import barred, raised_by_job
from orchestrator.analysis.replicates import join
from orchestrator.analysis.selection import settings_of
from orchestrator.core.card_check import Passport, spread_of_runs
from orchestrator.core.measurement import Measurement
from orchestrator.results.passports import read_passports
from orchestrator.results.tables import from_table
from workloads.util.statistics import ALIKE, Spread, student_t_quantile, student_t_two_sided

TITLE = "Intervals: a grid repeated ten times"
TAKES_S = Takes(whole=110, quick=None)
RUNS, REPLICATES = 10, 3

#: Mean, low and high of a cell in one run.
Told = tuple[float, float, float]


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    runs, replicates = (3, 2) if setting.smoke else (RUNS, REPLICATES)
    grid, text = setting.scratch / "grid.yaml", _grid(smoke=setting.smoke)
    if grid.exists() and grid.read_text() != text:
        raise RuntimeError(f"{setting.scratch} holds the rows of another grid")
    grid.write_text(text)
    joined: list[Mapping[str, Told]] = []
    of_run_alone: list[Mapping[str, Told]] = []
    passports: list[Passport] = []
    differ: list[Spread] = []
    single: list[Mapping[str, Told]] = []
    between: list[float] = []
    flagged, cells = 0, set[str]()
    for number, rows in enumerate(_rows_of_runs(setting, grid, runs, replicates)):
        turns = range(number * replicates, (number + 1) * replicates)
        passports += [p for n in turns for p in read_passports(setting.scratch / f"turn-{n}")]
        differ.append(spread_of_runs(passports))
        cells |= {row.job_id for row in rows if row.replicate == 1}
        raised = raised_by_job(rows)
        flagged += len(raised)
        unusable = {job_id for job_id, flags in raised.items() if barred(flags)}
        if setting.smoke:  # it has to work on a busy machine, too
            unusable.clear()
        # A flagged row says that its figure does not hold, and ranks nowhere. A cell that has no
        # others, or one alone, has no interval over processes that anybody is shown.
        for told, runs_differ in ((of_run_alone, ALIKE), (joined, differ[-1])):
            found = [
                cell
                for cell in join(rows, settings_of(rows, raised), raised, runs=runs_differ).cells
                if cell.spread and unusable.isdisjoint(row.job_id for row in cell.counted)
            ]
            told.append({cell.replicates[0].job_id: _told(cell.row) for cell in found})
        single.append(
            {r.job_id: _told(r) for r in rows if r.replicate == 1 and r.job_id not in unusable}
        )
        between += [cell.spread.between / cell.spread.mean for cell in found if cell.spread]
    if not all(coverage(told)[1] for told in (joined, single)):
        raise RuntimeError(
            f"{flagged} rows are flagged, and no cell has two that are not, in two runs; repeat "
            "it on a quiet machine"
        )
    root = math.sqrt(runs / (runs - 1))
    plain, pairs = coverage(joined)
    widened, _ = coverage(joined, root)
    own, _ = coverage(of_run_alone)
    alone, _ = coverage(single)
    quantile = student_t_quantile(0.975, replicates - 1)
    expected = 1 - student_t_two_sided(quantile / root, replicates - 1)

    def line(what: str, share: float, goals: Sequence[Goal] = (Goal(),)) -> list[Line]:
        covered = max(100 * share, 1e-9)
        return [Line(what=what, against="", unit="%", ours=(covered,), goal=goal) for goal in goals]

    goals = (Goal(kind="at least", value=90), Goal(kind="at most", value=98))
    lines = [
        *line("95 % intervals over processes that cover the mean of the other runs", plain, goals),
        *line("the same, widened by the error of that mean", widened),
        *line("95 % intervals over processes, from the run alone, that cover it", own),
        *line("95 % intervals within one process that cover it", alone),
    ]
    return lines, {
        "runs": runs,
        "cells": len(cells),
        "fresh processes a run": replicates,
        "pairs of run and cell, each of two processes or more": pairs,
        "covered where runs scatter alike, not widened, %": round(100 * expected, 1),
        "median standard deviation between processes, %": round(
            100 * statistics.median(between), 2
        ),
        "speed differs from run to run, by the passports so far, %": [
            round(100 * each.deviation, 2) for each in differ
        ],
        "median half width over processes, %": _half_width(joined),
        "median half width over processes, from the run alone, %": _half_width(of_run_alone),
        "median half width within one process, %": _half_width(single),
        "rows flagged, and left out": f"{flagged} of {runs * replicates * len(cells)}",
    }


def coverage(runs: Sequence[Mapping[str, Told]], widen: float = 1.0) -> tuple[float, int]:
    """The share of intervals that cover the mean of the other runs, and of how many."""
    covered = pairs = 0
    by_cell: dict[str, list[Told]] = defaultdict(list)
    for told in runs:
        for cell, one in told.items():
            by_cell[cell].append(one)
    for every in by_cell.values():
        for number, (mean, low, high) in enumerate(every):
            others = [other for at, (other, _, _) in enumerate(every) if at != number]
            if not others:
                continue
            distance = statistics.fmean(others) - mean
            covered += widen * (low - mean) <= distance <= widen * (high - mean)
            pairs += 1
    return (covered / pairs if pairs else 0.0), pairs


def _half_width(runs: Sequence[Mapping[str, Told]]) -> float:
    halves = [(high - low) / 2 / mean for told in runs for mean, low, high in told.values()]
    return round(100 * statistics.median(halves), 2)


def _told(row: Measurement) -> Told:
    metrics = row.metrics
    known = (metrics.throughput, metrics.throughput_low, metrics.throughput_high)
    if None in known:
        raise RuntimeError(f"job {row.job_id} has no interval: {metrics.repeats} repeats")
    return known  # type: ignore[return-value]


def _rows_of_runs(
    setting: Setting, grid: Path, runs: int, replicates: int
) -> Iterator[list[Measurement]]:
    """The rows of each run, from as many fresh processes as it has replicates; turns that an
    earlier call has kept are not repeated."""
    files = [setting.scratch / f"rows-{number}.parquet" for number in range(runs * replicates)]
    first = next((number for number, file in enumerate(files) if not file.exists()), len(files))
    if first < len(files):
        with contextlib.ExitStack() as stack:
            forks = setting.started(
                stack,
                "processes of a run",
                sys.executable,
                "replicates.py",
                *(grid, replicates, setting.scratch, first),
                environment=environment(),
            )
            for number in range(first, len(files)):
                setting.say(f"  turn {number}: {forks.turn()['wall_s']:.0f} s")
    for run in range(0, len(files), replicates):
        yield [
            row for file in files[run : run + replicates] for row in from_table(pq.read_table(file))
        ]


def _grid(*, smoke: bool) -> str:
    """Twenty cells of a tiny model: two precisions, two batch sizes, five lengths."""
    return json.dumps(
        {
            "name": "intervals",
            "defaults": {
                "workload": "text-generation",
                "model": "tiny-chatglm3",
                "accelerator": "CPU",
                "prompts": 2,
                "ignore_eos": True,
            },
            "measure": {"warmup": 1, "min_repeats": 3, "max_repeats": 4, "time_limit_s": 20},
            "experiments": [
                {
                    "name": "cells",
                    "replicates": 2 if smoke else REPLICATES,
                    "axes": {
                        "precision": ["fp32"] if smoke else ["fp32", "bf16"],
                        "batch_size": [1, 2],
                        "output_tokens": [2] if smoke else [2, 3, 4, 6, 8],
                    },
                }
            ],
        }
    )
