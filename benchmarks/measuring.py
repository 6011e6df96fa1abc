"""Does the grid disturb what it measures, and what does a worker cost beside a plain script.

The grid (`nightgrid run` on this machine as one CPU card) measures the same text generation three
times: on a worker that just started (and loads the model), on the same worker warm, and on a fresh
process (``isolation: process``). Beside it a plain script does the same loop with the same prompts:
load, warm up, repeat, print. Grid and script take turns, each from a standing start.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Goal, Line
from benchmarks.setting import Setting

TITLE = "Measuring inside the grid and outside"
PROMPTS, BATCH = 16, 8


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.data.catalog import load_examples
    from workloads.models.loading import encode_prompt, load_tokenizer, open_model

    model = "tiny-chatglm3" if setting.smoke else "smollm2-135m-instruct"
    output_tokens, repeats = (4, 2) if setting.smoke else (32, 5)
    source = open_model(model)
    tokenizer = load_tokenizer(source)
    texts = [example.content for example in load_examples("english-prompts")[:PROMPTS]]
    prompts = setting.scratch / "prompts.json"
    prompts.write_text(json.dumps([list(encode_prompt(tokenizer, source, t)) for t in texts]))
    grid = setting.scratch / "grid.yaml"
    grid.write_text(_grid(model, output_tokens, repeats))
    inside: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "fresh": []}
    outside: list[dict[str, float]] = []
    for number in range(1 if setting.smoke else setting.turns):
        setting.say(f"  turn {number + 1}: the grid")
        for name, told in _grid_turn(grid, setting.scratch / f"results-{number}").items():
            inside[name].append(told)
        setting.say(f"  turn {number + 1}: the script")
        with contextlib.ExitStack() as stack:
            began = time.perf_counter()
            script = setting.started(
                stack,
                f"script {number}",
                sys.executable,
                "bare_generation.py",
                *(source.path, prompts, output_tokens, BATCH, repeats),
            )
            outside.append(script.turn() | {"from_start_s": time.perf_counter() - began})

    def column(rows: list[dict[str, float]], name: str) -> tuple[float, ...]:
        return tuple(row[name] for row in rows)

    def rate(what: str, ours: str, against: str, theirs: list[dict[str, float]]) -> Line:
        return Line(
            what=what,
            against=against,
            unit="tokens/s",
            ours=column(inside[ours], "tokens_per_s"),
            theirs=column(theirs, "tokens_per_s"),
            goal=Goal(kind="within", value=0.02),
            cpu_ratio=median(
                mine["tokens_per_cpu_s"] / other["tokens_per_cpu_s"]
                for mine, other in zip(inside[ours], theirs, strict=True)
            ),
        )

    lines = [
        rate("in the grid, a worker that just started", "cold", "the script", outside),
        rate("in the grid, a warm worker", "warm", "a fresh process", inside["fresh"]),
        Line(
            what="peak memory of a worker",
            against="the script",
            unit="MiB",
            ours=column(inside["cold"], "peak_mib"),
            theirs=column(outside, "peak_mib"),
            goal=Goal(kind="at most", value=1.05),
        ),
        Line(
            what="loading the model in a worker",
            against="the script",
            unit="s",
            ours=column(inside["cold"], "load_s"),
            theirs=column(outside, "load_s"),
            goal=Goal(kind="at most", value=1.05),
        ),
        Line(
            what="loading the model for the second job of a card",
            against="",
            unit="s",
            ours=column(inside["warm"], "load_s"),
            goal=Goal(kind="at most", value=0.0),
            note="paid once per card",
        ),
    ]
    return lines, {"model": model, "prompts": PROMPTS, "output tokens": output_tokens}


def _grid(model: str, output_tokens: int, repeats: int) -> str:
    job = f"{{workload: text-generation, precision: fp32, batch_size: {BATCH}"
    return (
        "name: measuring\n"
        "defaults:\n"
        f"  model: {model}\n"
        "  dataset: english-prompts\n"
        "  accelerator: CPU\n"
        f"  output_tokens: {output_tokens}\n"
        f"  prompts: {PROMPTS}\n"
        "  ignore_eos: true\n"
        f"measure: {{warmup: 1, min_repeats: {repeats}, max_repeats: {repeats}}}\n"
        "experiments:\n"
        f"  - {{name: first, keep_texts: 1, {job[1:]}}}\n"
        f"  - {{name: second, keep_texts: 2, {job[1:]}}}\n"
        f"  - {{name: alone, keep_texts: 3, isolation: process, {job[1:]}}}\n"
    )


def _grid_turn(grid: Path, results: Path) -> dict[str, dict[str, float]]:
    """The three rows; which of the two on a shared worker came first is seen in them."""
    from orchestrator.results.store import Store

    command = ["run", str(grid), "--emulate", "1x1:CPU", "--results", str(results), "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"nightgrid run ended with {done.returncode}: {done.stderr[-800:]}")
    found = {}
    for row in Store.existing(results, "measuring").read().measurements:
        kind = "fresh" if row.isolation == "process" else "warm" if row.load_s == 0 else "cold"
        passes: dict[int, list[Any]] = {}
        for _, sample in row.samples:
            if not sample.warmup and sample.complete:
                passes.setdefault(sample.repeat, []).append(sample)
        found[kind] = {
            "tokens_per_s": median(_rate(each, "wall_s") for each in passes.values()),
            "tokens_per_cpu_s": median(_rate(each, "cpu_s") for each in passes.values()),
            "peak_mib": (row.peak_host_memory_bytes or 0) / 2**20,
            "load_s": row.load_s or 0.0,
        }
    return found


def _rate(samples: list[Any], time_of: str) -> float:
    tokens = sum(sample.output_tokens for sample in samples)
    return float(tokens / sum(getattr(sample, time_of) for sample in samples))
