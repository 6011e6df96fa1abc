"""Does a card that shares its host's processors measure what one alone on the host does.

The demonstration's grid runs on sixteen emulated cards of this machine, and again on one CPU card,
which has the machine to itself; every worker has the same number of threads. Cells of precisions
that both support stand side by side, turn by turn. How long both runs take is told as well, and
what their flags say: on a machine that others use, rows are disturbed, and cells without any row
that is not are left out of the comparison. By CPU second all rows are compared, disturbed or not.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contender import ROOT
from benchmarks.figures import Goal, Line
from benchmarks.night import THREADS, night
from benchmarks.setting import Setting, Takes
from orchestrator.analysis.flags import barred, raised_on
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.results.store import Store

TITLE = "The demonstration on emulated cards, beside one card alone"
TAKES_S = Takes(whole=60, quick=None)
GRID = ROOT / "grids" / "smoke.yaml"
SIDES = {"emulated": "2x8", "alone": "1x1:CPU"}
_WITHIN = Goal(kind="within", value=0.15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds of one run, and its measured rows."""

    took_s: float
    rows: tuple[Measurement, ...]

    @property
    def flagged(self) -> tuple[Measurement, ...]:
        """The rows that rank nowhere."""
        return tuple(row for row in self.rows if barred(raised_on(row)))

    def cpu_rates(self) -> dict[str, float]:
        """Work per CPU second of every cell, which other programs hardly change."""
        return {
            cell(row): row.metrics.throughput * row.metrics.measure_s / row.metrics.cpu_s
            for row in self.rows
            if row.metrics.throughput and row.metrics.measure_s and row.metrics.cpu_s
        }

    def rates(self) -> dict[str, float]:
        """Throughput of the cells whose rows rank."""
        flagged = {row.job_id for row in self.flagged}
        return {
            cell(row): row.metrics.throughput
            for row in self.rows
            if row.job_id not in flagged and row.metrics.throughput
        }


def cell(row: Measurement) -> str:
    """Name of a row's cell: ``fp32 × 8``."""
    return f"{row.precision} × {row.batch_size}"


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.models.loading import open_model

    open_model("tiny-chatglm3")  # made here, not in anybody's turn
    grids = {
        side: _grid(setting.scratch, side, "CPU" if side == "alone" else None, setting.smoke)
        for side in SIDES
    }
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    for number in range(setting.sized(max(1, setting.turns // 2), 1, 1)):
        order = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
        for side in order:
            setting.say(f"  {side}, turn {number + 1}")
            results = setting.scratch / f"{side}-{number}"
            took_s, rows = _turn(results, grids[side], side)
            measured = tuple(row for row in rows if row.state is State.SUCCEEDED and row.final)
            turns[side].append(Turn(took_s=took_s, rows=measured))
    return lines_of(turns["emulated"], turns["alone"]), {
        "grid": GRID.name,
        "threads of each worker": THREADS,
        "flagged rows of all, emulated": [_share(turn) for turn in turns["emulated"]],
        "flagged rows of all, alone": [_share(turn) for turn in turns["alone"]],
        **_facts("emulated", turns["emulated"]),
        **_facts("alone", turns["alone"]),
    }


def _turn(results: Path, grid: Path, side: str) -> tuple[float, Sequence[Measurement]]:
    """Seconds and rows of a run; of one that an earlier call has kept, those."""
    took = results / "took_s"
    if took.exists():
        return float(took.read_text()), Store.existing(results, side).read().measurements
    shutil.rmtree(results, ignore_errors=True)  # of a run that was cut off
    results.mkdir()
    took_s, rows = night(grid, side, results, emulate=SIDES[side])
    took.write_text(repr(took_s))
    return took_s, rows


def lines_of(emulated: Sequence[Turn], alone: Sequence[Turn]) -> list[Line]:
    """A line for all cells, whose "turns" are cells; then one for the runs."""
    ours, theirs = (_joined([turn.rates() for turn in side]) for side in (emulated, alone))
    both = [name for name in ours if name in theirs]
    lines = [
        Line(
            what="the whole command",
            against="one card alone",
            unit="s",
            ours=tuple(turn.took_s for turn in emulated),
            theirs=tuple(turn.took_s for turn in alone),
            note=f"rows of {_cells(emulated)} cells beside {_cells(alone)}",
        )
    ]
    of_cpu = [_joined([turn.cpu_rates() for turn in side]) for side in (emulated, alone)]
    if cells := [name for name in of_cpu[0] if name in of_cpu[1]]:
        lines.append(
            Line(
                what=f"tokens per CPU second of a cell: median and spread over {len(cells)} cells",
                against="one card alone",
                unit="tokens/CPU s",
                ours=tuple(median(of_cpu[0][name]) for name in cells),
                theirs=tuple(median(of_cpu[1][name]) for name in cells),
                goal=_WITHIN,
            )
        )
    if not both:
        return lines
    together = Line(
        what=f"tokens/s of a cell: median and spread over {len(both)} cells",
        against="one card alone",
        unit="tokens/s",
        ours=tuple(median(ours[name]) for name in both),
        theirs=tuple(median(theirs[name]) for name in both),
        goal=_WITHIN,
    )
    near = sum(abs(ratio - 1) <= _WITHIN.value for ratio in together.ratios)
    lines.append(
        Line(
            what="cells within 15 % of one card alone",
            against="",
            unit=f"of {len(both)}",
            ours=(float(near),),
        )
    )
    return [together, *lines]


def _joined(turns: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The rates of each cell in the turns that have it."""
    found: dict[str, list[float]] = {}
    for turn in turns:
        for name, rate in turn.items():
            found.setdefault(name, []).append(rate)
    return found


def _cells(turns: Sequence[Turn]) -> int:
    return len({cell(row) for turn in turns for row in turn.rows})


def _share(turn: Turn) -> str:
    return f"{len(turn.flagged)} of {len(turn.rows)}"


def _facts(side: str, turns: Sequence[Turn]) -> Mapping[str, Any]:
    rows = [row for turn in turns for row in turn.rows]
    cores = [row.processor_cores for row in rows if row.processor_cores is not None]
    waits = [row.processor_wait_share for row in rows if row.processor_wait_share is not None]
    stolen = [row.stolen_share for row in rows if row.stolen_share is not None]
    loads = [row.host_load for row in rows if row.host_load is not None]
    return {
        f"medians over rows, {side}: cores, share waiting, stolen, load of the host": [
            round(median(values), 3) for values in (cores, waits, stolen, loads) if values
        ]
    }


def _grid(directory: Path, side: str, accelerator: str | None, smoke: bool) -> Path:
    """The demonstration's grid under a name of its own, on another kind of card if asked for."""
    import yaml

    grid = yaml.safe_load(GRID.read_text())
    grid["name"] = side
    if accelerator is not None:
        grid["defaults"]["accelerator"] = accelerator
    if smoke:
        grid["experiments"][0]["axes"] = {"precision": ["fp32"], "batch_size": [16]}
    path = directory / f"{side}.yaml"
    path.write_text(yaml.safe_dump(grid))
    return path
