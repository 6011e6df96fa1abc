"""A real grid: 24 cells of precision × batch size, beside optimum-benchmark's multirun.

Both measure the same model's text generation in the same 24 cells: two warm-up passes, three timed
ones, prompts and answers of the same lengths, one thread, the same libraries (those of
optimum-benchmark's environment, in which Nightgrid is installed too). optimum-benchmark isolates
each cell in a process of its own, which imports and loads anew; here one worker keeps the model of
a precision. End to end is what a user waits for each command; how much faster that is depends on
how long a pass takes, so that what a cell costs besides its timed passes is told as well. Cell by
cell the two throughputs stand side by side: they should be equal, for both call transformers'
``generate``.

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
from benchmarks.setting import Setting

TITLE = "A real grid: 24 precision × batch-size cells of text generation"
MODEL = "tiny-chatglm3"
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
INPUT_TOKENS, OUTPUT_TOKENS, WARM_UPS, REPEATS = 32, 8, 2, 3
_PEER = "optimum-benchmark --multirun, launcher=process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A command's duration, and the seconds of each timed pass of each cell."""

    took_s: float
    cells: Mapping[str, Sequence[float]]

    @property
    def besides_s(self) -> float:
        """Seconds that a cell takes beyond its timed passes."""
        return (self.took_s - sum(map(sum, self.cells.values()))) / len(self.cells)


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.models.loading import open_model

    batches = (1, 2) if setting.smoke else BATCHES
    directory = open_model(MODEL).path  # made here, not in anybody's turn
    # One turn: the peer's takes minutes, and the cells are many turns of the same comparison.
    setting.say("  nightgrid")
    ours = [_nightgrid(setting, setting.scratch / "ours", batches)]
    theirs: list[Turn] = []
    if setting.optimum_python is not None:
        setting.say("  optimum-benchmark")
        place = setting.scratch / "theirs"
        theirs = [_optimum(setting.optimum_python, place, directory, batches)]
    lines = [
        Line(
            what=f"{len(ours[0].cells)} cells, end to end: cells per minute",
            against=_PEER if theirs else "",
            unit="cells/min",
            ours=tuple(60 * len(turn.cells) / turn.took_s for turn in ours),
            theirs=tuple(60 * len(turn.cells) / turn.took_s for turn in theirs),
            goal=Goal(kind="at least", value=5.0) if theirs else Goal(),
        ),
        Line(
            what="a cell besides its timed passes",
            against="optimum-benchmark" if theirs else "",
            unit="s",
            ours=tuple(turn.besides_s for turn in ours),
            theirs=tuple(turn.besides_s for turn in theirs),
        ),
        *(lines_of_cells(ours, theirs) if theirs else ()),
    ]
    facts = {
        "model": MODEL,
        "threads of each": THREADS,
        "tokens of a prompt": INPUT_TOKENS,
        "tokens of an answer": OUTPUT_TOKENS,
        "seconds, ours": [turn.took_s for turn in ours],
        "seconds, theirs": [turn.took_s for turn in theirs],
    }
    return lines, facts


def lines_of_cells(ours: Sequence[Turn], theirs: Sequence[Turn]) -> list[Line]:
    """A line for all cells, whose "turns" are cells, then one for each."""
    mine, others = _rates(ours), _rates(theirs)
    together = Line(
        what=f"tokens/s of a cell: median and spread over {len(mine)} cells",
        against="optimum-benchmark",
        unit="tokens/s",
        ours=tuple(map(median, mine.values())),
        theirs=tuple(map(median, others.values())),
        goal=Goal(kind="within", value=0.05),
        note="equal within noise",
    )
    return [
        together,
        *(
            Line(
                what=f"tokens/s of the cell {cell}",
                against="optimum-benchmark",
                unit="tokens/s",
                ours=mine[cell],
                theirs=others[cell],
            )
            for cell in mine
        ),
    ]


def _rates(turns: Sequence[Turn]) -> dict[str, tuple[float, ...]]:
    """Tokens/s of each cell (``fp32 × 8``), by turn, of the median pass."""
    return {
        cell: tuple(
            OUTPUT_TOKENS * int(cell.split()[-1]) / median(turn.cells[cell]) for turn in turns
        )
        for cell in turns[0].cells
    }


def _nightgrid(setting: Setting, results: Path, batches: tuple[int, ...]) -> Turn:
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
        "    axes:\n"
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


def _optimum(python: Path, directory: Path, model: str, batches: tuple[int, ...]) -> Turn:
    directory.mkdir(parents=True)
    (directory / "cells.yaml").write_text(
        "defaults: [benchmark, {scenario: inference}, {launcher: process}, "
        "{backend: pytorch}, _self_]\n"
        "name: cells\n"
        "launcher: {device_isolation: false}\n"
        f"backend: {{device: cpu, model: {model}, task: text-generation, torch_dtype: float32}}\n"
        # Before these warm-ups it generates twice in full, where there are any.
        f"scenario: {{latency: true, iterations: {REPEATS}, duration: 0, warmup_runs: 1,\n"
        f"  input_shapes: {{batch_size: 1, sequence_length: {INPUT_TOKENS}}},\n"
        f"  generate_kwargs: {{max_new_tokens: {OUTPUT_TOKENS}, "
        f"min_new_tokens: {OUTPUT_TOKENS}}}}}\n"
        "hydra: {job: {chdir: true}}\n"
    )
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


def _names(batches: tuple[int, ...]) -> list[str]:
    return [f"{precision} × {batch}" for precision in PRECISIONS for batch in batches]
