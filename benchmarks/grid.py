"""A real grid: 24 cells of precision × batch size, beside optimum-benchmark's multirun.

Both measure the same model's text generation in the same 24 cells: two warm-up passes, three timed
ones, prompts and answers of the same lengths, one thread, the same libraries (those of
optimum-benchmark's environment, in which Nightgrid is installed too). Kept stands beside kept: one
process for all cells, theirs by ``launcher=inline``, ours on one worker, which keeps the model of a
precision as well. Fresh stands beside fresh, in twelve of the cells: a process for each, which
loads anew, by ``launcher=process`` and by ``isolation: process``. End to end is what a user waits
for; how much faster that is depends on how long a pass takes, so that what a cell costs besides its
timed passes is told as well. Cell by cell the throughputs stand side by side; both call
transformers' ``generate``.

What differs: optimum-benchmark makes up its prompts' tokens, forces the length by forbidding the
end, and warms up once more with two tokens; Nightgrid takes English prompts cut to the length and
ignores the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Goal, Line
from benchmarks.night import THREADS, night, timed
from benchmarks.setting import PROGRAMS, Setting, Takes

TITLE = "A real grid: 24 precision × batch-size cells of text generation"
TAKES_S = Takes(whole=100, quick=45)
MODEL = "tiny-chatglm3"
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: A fresh process costs the peer seven seconds a cell, so fewer cells have one.
BATCHES = {"kept": (1, 2, 3, 4, 6, 8, 12, 16), "fresh": (1, 3, 6, 12)}
INPUT_TOKENS, OUTPUT_TOKENS, WARM_UPS, REPEATS = 32, 8, 2, 3
_PEERS = {
    "kept": "optimum-benchmark, launcher=inline",
    "fresh": "optimum-benchmark, launcher=process",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A command's duration, and the seconds of each timed pass of each cell."""

    took_s: float
    cells: Mapping[str, Sequence[float]]

    @property
    def cells_per_minute(self) -> float:
        """Cells by the whole duration of the command."""
        return 60 * len(self.cells) / self.took_s

    @property
    def besides_s(self) -> float:
        """Seconds that a cell takes beyond its timed passes."""
        return (self.took_s - sum(map(sum, self.cells.values()))) / len(self.cells)


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.models.loading import open_model

    sizes = setting.sized(BATCHES, dict.fromkeys(_PEERS, (8,)), dict.fromkeys(_PEERS, (1, 2)))
    directory = open_model(MODEL).path  # made here, not in anybody's turn
    # One turn: the peer's takes minutes, and the cells are many turns of the same comparison.
    ours: dict[str, Turn] = {}
    theirs: dict[str, Turn] = {}
    for way, batches in sizes.items():
        setting.say(f"  nightgrid, {way} processes")
        ours[way] = _nightgrid(setting, setting.scratch / f"ours-{way}", batches, way)
        if setting.optimum_python is not None:
            setting.say(f"  {_PEERS[way]}")
            place = setting.scratch / f"theirs-{way}"
            measure = _optimum_kept if way == "kept" else _optimum_fresh
            theirs[way] = measure(setting.optimum_python, place, directory, batches)
    lines = [
        line
        for way, mine in ours.items()
        for line in (
            Line(
                what=f"{len(mine.cells)} cells, end to end, {way} processes",
                against=_PEERS[way] if theirs else "",
                unit="cells/min",
                ours=(mine.cells_per_minute,),
                theirs=tuple(turn.cells_per_minute for turn in _of(theirs, way)),
            ),
            Line(
                what=f"a cell besides its timed passes, {way} processes",
                against=_PEERS[way] if theirs else "",
                unit="s",
                ours=(mine.besides_s,),
                theirs=tuple(turn.besides_s for turn in _of(theirs, way)),
            ),
        )
    ]
    if theirs:
        lines.append(
            Line(
                what="cells, end to end, both by default: kept beside fresh processes",
                against=_PEERS["fresh"],
                unit="cells/min",
                ours=(ours["kept"].cells_per_minute,),
                theirs=(theirs["fresh"].cells_per_minute,),
                goal=Goal() if setting.quick else Goal(kind="at least", value=5.0),
                note=f"{len(ours['kept'].cells)} cells beside {len(theirs['fresh'].cells)}; "
                "keeping its process gives "
                f"{theirs['kept'].cells_per_minute / theirs['fresh'].cells_per_minute:.3g} of it: "
                "theirs kept beside theirs fresh",
            )
        )
        lines += [line_of_cells(ours[way], theirs[way], _PEERS[way]) for way in _PEERS]
    facts = {
        "model": MODEL,
        "threads of each": THREADS,
        "tokens of a prompt": INPUT_TOKENS,
        "tokens of an answer": OUTPUT_TOKENS,
        "seconds, ours": {way: turn.took_s for way, turn in ours.items()},
        "seconds, theirs": {way: turn.took_s for way, turn in theirs.items()},
    }
    if theirs:
        facts["our tokens/s over theirs, kept processes"] = ratios_of_cells(
            ours["kept"], theirs["kept"]
        )
    return lines, facts


def _of(turns: Mapping[str, Turn], way: str) -> list[Turn]:
    return [turns[way]] if way in turns else []


def line_of_cells(ours: Turn, theirs: Turn, against: str) -> Line:
    """A line whose "turns" are cells."""
    mine, others = _rates(ours), _rates(theirs)
    return Line(
        what=f"tokens/s of a cell: median and spread over {len(mine)} cells",
        against=against,
        unit="tokens/s",
        ours=tuple(mine.values()),
        theirs=tuple(others[cell] for cell in mine),
        goal=Goal(kind="within", value=0.05),
    )


def ratios_of_cells(ours: Turn, theirs: Turn) -> dict[str, float]:
    """Our tokens/s over theirs, cell by cell."""
    others = _rates(theirs)
    return {cell: rate / others[cell] for cell, rate in _rates(ours).items()}


def _rates(turn: Turn) -> dict[str, float]:
    """Tokens/s of each cell (``fp32 × 8``), of the median pass."""
    return {
        cell: OUTPUT_TOKENS * int(cell.split()[-1]) / median(passes)
        for cell, passes in turn.cells.items()
    }


def _nightgrid(setting: Setting, results: Path, batches: tuple[int, ...], way: str) -> Turn:
    results.mkdir(parents=True)
    grid = results / "grid.yaml"
    grid.write_text(
        "name: cells\n"
        f"measure: {{warmup: {WARM_UPS}, min_repeats: {REPEATS}, max_repeats: {REPEATS}}}\n"
        "experiments:\n"
        "  - name: cells\n"
        "    workload: text-generation\n"
        f"    model: {MODEL}\n"
        "    dataset: english-prompts\n"
        "    accelerator: CPU\n"
        f"    input_tokens: {INPUT_TOKENS}\n"
        f"    output_tokens: {OUTPUT_TOKENS}\n"
        "    ignore_eos: true\n"
        "    prompts: 1\n"  # one batch a repeat, whatever its size
        + ("    isolation: process\n" if way == "fresh" else "")
        + "    axes:\n"
        f"      precision: [{', '.join(PRECISIONS)}]\n"
        f"      batch_size: {list(batches)}\n"
    )
    took_s, rows = night(grid, "cells", results, str(setting.optimum_python or sys.executable))
    passes = {
        f"{row.precision} × {row.batch_size}": tuple(
            sample.wall_s for _, sample in row.samples if sample.complete and not sample.warmup
        )
        for row in rows
    }
    return Turn(took_s=took_s, cells={cell: passes[cell] for cell in _names(batches)})


def _optimum_kept(python: Path, directory: Path, model: str, batches: tuple[int, ...]) -> Turn:
    """All cells in one process, by its Python interface."""
    directory.mkdir(parents=True)
    cells = {
        f"{precision} × {batch}": (
            {"device": "cpu", "model": model, "task": "text-generation", "torch_dtype": dtype},
            _scenario(batch),
        )
        for precision, dtype in PRECISIONS.items()
        for batch in batches
    }
    wanted, found = directory / "cells.json", directory / "found.json"
    wanted.write_text(json.dumps(cells))
    program = PROGRAMS / "optimum_inline.py"
    took_s = timed("optimum-benchmark", python, program, wanted, found, cwd=directory)
    return Turn(took_s=took_s, cells=json.loads(found.read_text()))


def _optimum_fresh(python: Path, directory: Path, model: str, batches: tuple[int, ...]) -> Turn:
    """A process for each cell, by its command."""
    directory.mkdir(parents=True)
    config = {
        "defaults": [
            "benchmark",
            {"scenario": "inference"},
            {"launcher": "process"},
            {"backend": "pytorch"},
            "_self_",
        ],
        "name": "cells",
        "launcher": {"device_isolation": False},
        "backend": {
            "device": "cpu",
            "model": model,
            "task": "text-generation",
            "torch_dtype": "float32",
        },
        "scenario": _scenario(1),
        "hydra": {"job": {"chdir": True}},
    }
    (directory / "cells.yaml").write_text(json.dumps(config))  # which is YAML
    took_s = timed(
        "optimum-benchmark",
        *(python.with_name("optimum-benchmark"), "--multirun"),
        *("--config-dir", directory, "--config-name", "cells"),
        f"backend.torch_dtype={','.join(PRECISIONS.values())}",
        f"scenario.input_shapes.batch_size={','.join(map(str, batches))}",
        f"hydra.sweep.dir={directory / 'sweep'}",
        cwd=directory,
    )
    cells = {}
    for number, name in enumerate(_names(batches)):
        report = directory / "sweep" / str(number) / "benchmark_report.json"
        cells[name] = json.loads(report.read_text())["generate"]["latency"]["values"]
    return Turn(took_s=took_s, cells=cells)


def _scenario(batch: int) -> dict[str, Any]:
    """Before its warm-ups it generates twice in full, where there are any: one is enough."""
    return {
        "latency": True,
        "iterations": REPEATS,
        "duration": 0,
        "warmup_runs": 1,
        "input_shapes": {"batch_size": batch, "sequence_length": INPUT_TOKENS},
        "generate_kwargs": {"max_new_tokens": OUTPUT_TOKENS, "min_new_tokens": OUTPUT_TOKENS},
    }


def _names(batches: tuple[int, ...]) -> list[str]:
    return [f"{precision} × {batch}" for precision in PRECISIONS for batch in batches]
