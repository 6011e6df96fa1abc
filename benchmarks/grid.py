"""A real grid: 24 cells of precision × batch size, beside optimum-benchmark's multirun.

Both measure the same model's text generation in the same 24 cells with one warm-up pass and three
timed ones, prompts and answers of the same length. optimum-benchmark isolates each cell in a
process of its own, which imports and loads anew; here one worker keeps the model of a precision.
End to end is what a user waits for each command. Cell by cell the two throughputs stand side by
side: they should be equal, for both call transformers' ``generate``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Goal, Line
from benchmarks.setting import Setting

TITLE = "A real grid: 24 precision × batch-size cells of text generation"
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
INPUT_TOKENS, OUTPUT_TOKENS, REPEATS = 32, 16, 3


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.models.loading import open_model

    model = "tiny-chatglm3" if setting.smoke else "smollm2-135m-instruct"
    batches = (1, 2) if setting.smoke else BATCHES
    directory = open_model(model).path
    ours_s, theirs_s = [], []
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    with_peer, refused = setting.peers_python is not None, ""
    # A turn of the peer takes minutes, so there are two of them at most.
    for number in range(1 if setting.smoke else min(setting.turns, 2)):
        setting.say(f"  turn {number + 1}: nightgrid")
        took, cells = _nightgrid(setting.scratch / f"ours-{number}", model, batches)
        ours_s.append(took)
        _add(ours, cells)
        if with_peer:
            setting.say(f"  turn {number + 1}: optimum-benchmark")
            try:
                took, cells = _optimum(
                    setting, setting.scratch / f"theirs-{number}", directory, batches
                )
            except (RuntimeError, OSError) as error:
                with_peer, refused = False, str(error)[-300:]
                setting.say(f"  optimum-benchmark does not run here: {refused}")
                continue
            theirs_s.append(took)
            _add(theirs, cells)
    speed_up = [other / mine for mine, other in zip(ours_s, theirs_s, strict=False)]
    lines = [
        Line(
            what=f"{len(ours)} cells, end to end: cells per minute",
            against="optimum-benchmark --multirun, launcher=process" if with_peer else "",
            unit="cells/min",
            ours=tuple(60 * len(ours) / took for took in ours_s),
            theirs=tuple(60 * len(ours) / took for took in theirs_s) if with_peer else (),
            goal=Goal(kind="at least", value=5.0) if with_peer else Goal(),
        )
    ]
    for cell in theirs:
        lines.append(
            Line(
                what=f"tokens/s of the cell {cell}",
                against="optimum-benchmark",
                unit="tokens/s",
                ours=tuple(ours[cell]),
                theirs=tuple(theirs[cell]),
            )
        )
    ratios = [median(ours[cell]) / median(theirs[cell]) for cell in theirs]
    facts = {"model": model, "seconds, ours": ours_s, "seconds, theirs": theirs_s}
    if refused:
        facts["optimum-benchmark did not run, so nothing is compared"] = refused
    if ratios:
        facts["median ratio of throughput over the cells"] = median(ratios)
        facts["times faster, turn by turn"] = speed_up
    return lines, facts


def _add(found: dict[str, list[float]], cells: dict[str, float]) -> None:
    for cell, tokens_per_s in cells.items():
        found.setdefault(cell, []).append(tokens_per_s)


def _nightgrid(results: Path, model: str, batches: tuple[int, ...]) -> tuple[float, dict[str, Any]]:
    from orchestrator.results.store import Store

    results.mkdir(parents=True)
    grid = results / "grid.yaml"
    grid.write_text(
        "name: cells\n"
        f"measure: {{warmup: 1, min_repeats: {REPEATS}, max_repeats: {REPEATS}}}\n"
        "experiments:\n"
        "  - name: cells\n"
        "    workload: text-generation\n"
        f"    model: {model}\n"
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
    command = ["run", str(grid), "--emulate", "1x1:CPU", "--results", str(results), "--quiet"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"nightgrid run ended with {done.returncode}: {done.stderr[-800:]}")
    cells = {}
    for row in Store.existing(results, "cells").read().measurements:
        rates = [
            sample.output_tokens / sample.wall_s
            for _, sample in row.samples
            if sample.complete and not sample.warmup
        ]
        cells[f"{row.precision} × {row.batch_size}"] = median(rates)
    return took, cells


def _optimum(
    setting: Setting, directory: Path, model: str, batches: tuple[int, ...]
) -> tuple[float, dict[str, float]]:
    directory.mkdir(parents=True)
    (directory / "cells.yaml").write_text(
        "defaults: [benchmark, {scenario: inference}, {launcher: process}, "
        "{backend: pytorch}, _self_]\n"
        "name: cells\n"
        "launcher: {device_isolation: false}\n"
        f"backend: {{device: cpu, model: {model}, task: text-generation, torch_dtype: float32}}\n"
        f"scenario: {{latency: true, iterations: {REPEATS}, duration: 0, warmup_runs: 1,\n"
        f"  input_shapes: {{batch_size: 1, sequence_length: {INPUT_TOKENS}}},\n"
        f"  generate_kwargs: {{max_new_tokens: {OUTPUT_TOKENS}, "
        f"min_new_tokens: {OUTPUT_TOKENS}}}}}\n"
        "hydra: {job: {chdir: true}}\n"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [
            *(str(Path(setting.peer).with_name("optimum-benchmark")), "--multirun"),
            *("--config-dir", str(directory), "--config-name", "cells"),
            f"backend.torch_dtype={','.join(PRECISIONS.values())}",
            f"scenario.input_shapes.batch_size={','.join(map(str, batches))}",
            f"hydra.sweep.dir={directory / 'sweep'}",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    took = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"optimum-benchmark ended with {done.returncode}: {done.stderr[-1500:]}")
    cells = {}
    names = [f"{precision} × {batch}" for precision in PRECISIONS for batch in batches]
    for number, name in enumerate(names):
        report = json.loads(
            (directory / "sweep" / str(number) / "benchmark_report.json").read_text()
        )
        spent = sum(report[part]["latency"]["mean"] for part in ("prefill", "decode"))
        cells[name] = OUTPUT_TOKENS * int(name.split()[-1]) / spent
    return took, cells
