"""Does the grid disturb what it measures, and what does a worker cost beside a plain script.

The grid (`nightgrid run` on this machine as one CPU card) measures the same text generation three
times: on a worker that just started (and loads the model), on the same worker warm, and on a fresh
process (``isolation: process``). Beside it a plain script does the same loop with the same prompts:
load, warm up, repeat, print. Grid and script take turns, each from a standing start, each with the
same number of threads. Memory is the peak while generating, which loading is no part of.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.figures import Goal, Line, values
from benchmarks.night import THREADS, environment, night
from benchmarks.setting import Setting
from orchestrator.measurement import Measurement

TITLE = "Measuring inside the grid and outside"
PROMPTS, BATCH = 8, 8
_AS_MUCH = Goal(kind="at most", value=1.05)


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.data.catalog import load_examples
    from workloads.models.loading import encode_prompt, load_tokenizer, open_model

    model = "tiny-chatglm3" if setting.smoke else "smollm2-135m-instruct"
    output_tokens, repeats = (4, 2) if setting.smoke else (16, 5)
    source = open_model(model)
    tokenizer = load_tokenizer(source)
    texts = [example.content for example in load_examples("english-prompts")[:PROMPTS]]
    prompts = setting.scratch / "prompts.json"
    prompts.write_text(json.dumps([list(encode_prompt(tokenizer, source, t)) for t in texts]))
    grid = setting.scratch / "grid.yaml"
    grid.write_text(_grid(model, output_tokens, repeats))
    inside: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "fresh": []}
    outside: list[dict[str, Any]] = []
    for number in range(1 if setting.smoke else setting.turns):
        setting.say(f"  turn {number + 1}: the grid")
        _, rows = night(grid, "measuring", setting.scratch / f"results-{number}")
        for name, told in _of_rows(rows).items():
            inside[name].append(told)
        setting.say(f"  turn {number + 1}: the script")
        with contextlib.ExitStack() as stack:
            script = setting.started(
                stack,
                f"script {number}",
                sys.executable,
                "bare_generation.py",
                *(source.path, prompts, output_tokens, BATCH, repeats),
                environment=environment(),
            )
            outside.append(script.turn() | {"start_s": script.start_s})
    return _lines(inside, outside), {
        "model": model,
        "prompts": PROMPTS,
        "output tokens": output_tokens,
        "threads of each": THREADS,
    }


def _lines(
    inside: Mapping[str, list[dict[str, float]]], script: list[dict[str, Any]]
) -> list[Line]:
    def rate(what: str, ours: str, against: str, theirs: Sequence[Mapping[str, Any]]) -> Line:
        return Line(
            what=what,
            against=against,
            unit="tokens/s",
            ours=values(inside[ours], "tokens_per_s"),
            theirs=values(theirs, "tokens_per_s"),
            goal=Goal(kind="within", value=0.02),
            cpu_ratio=median(
                mine["tokens_per_cpu_s"] / other["tokens_per_cpu_s"]
                for mine, other in zip(inside[ours], theirs, strict=True)
            ),
        )

    def cost(what: str, unit: str, figure: str) -> Line:
        return Line(
            what=what,
            against="the script",
            unit=unit,
            ours=values(inside["cold"], figure),
            theirs=values(script, figure),
            goal=_AS_MUCH,
        )

    return [
        rate("in the grid, a worker that just started", "cold", "the script", script),
        rate("in the grid, a warm worker", "warm", "a fresh process", inside["fresh"]),
        cost("peak memory of a worker", "MiB", "peak_mib"),
        Line(
            what="start-up: from the end of a job to the next on a new process",
            against="the script's imports",
            unit="s",
            ours=values(inside["fresh"], "start_s"),
            theirs=values(script, "start_s"),
            goal=_AS_MUCH,
        ),
        cost("loading the model in a worker", "s", "load_s"),
        Line(
            what="loading the model for the second job of a card",
            against="",
            unit="s",
            ours=values(inside["warm"], "load_s"),
            goal=Goal(kind="at most", value=0.0),
            note="paid once per card",
        ),
    ]


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


def _of_rows(rows: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """The three rows; which of the two on a shared worker came first is seen in them."""
    found = {}
    in_time = sorted(rows, key=lambda row: row.started_at or 0.0)
    for row in in_time:
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
    # Whichever of the two processes came second.
    found["fresh"]["start_s"] = next(
        (after.started_at or 0.0) - (before.ended_at or 0.0)
        for before, after in pairwise(in_time)
        if after.worker_pid != before.worker_pid
    )
    return found


def _rate(samples: list[Any], time_of: str) -> float:
    tokens = sum(sample.output_tokens for sample in samples)
    return float(tokens / sum(getattr(sample, time_of) for sample in samples))
