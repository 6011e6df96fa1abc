"""The cost of a job over the bare engine: its throughput beside a plain script's.

A run on this machine as one CPU card measures the same text generation again and again: on a warm
worker, and on a process that just started (``isolation: process``) and loads the model. A plain
script does the same loop with the same prompts and the same number of threads, loaded once. It has
a turn before and after every job, beside the same idle Ray, and a job is compared with the mean of
its two neighbours. How far the script's own turns are from their neighbours stands beside that: no
difference smaller than this method's own can be seen. Memory is the peak while generating, which
loading is no part of. A warm worker and a fresh one have no turn together: the first job of one is
paired with the first of the other, and so on.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

from benchmarks.figures import Goal, Line, values
from benchmarks.night import THREADS, environment
from benchmarks.setting import Setting, Takes

TITLE = "What Nightgrid costs a job over the bare engine"
TAKES_S = Takes(whole=120, quick=None)
PROMPTS = 2
_AS_MUCH = Goal(kind="at most", value=1.05)
_THE_SAME = Goal(kind="within", value=0.02)


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from workloads.data.datasets import load_examples
    from workloads.models.loading import load_tokenizer, open_model
    from workloads.models.prompts import encode_prompt

    model = "tiny-chatglm3" if setting.smoke else "smollm2-135m-instruct"
    # Many short jobs: what the processor's speed does within seconds is shared by neighbours.
    jobs, output_tokens, repeats = setting.sized((30, 3, 1), (6, 3, 1), (1, 2, 1))
    source = open_model(model)
    tokenizer = load_tokenizer(source)
    texts = [example.content for example in load_examples("english-prompts")[:PROMPTS]]
    prompts = setting.scratch / "prompts.json"
    prompts.write_text(json.dumps([list(encode_prompt(tokenizer, source, t)) for t in texts]))
    grid = setting.scratch / "grid.yaml"
    grid.write_text(_grid(model, jobs, output_tokens, repeats))
    with contextlib.ExitStack() as stack:
        both = setting.started(
            stack,
            "the grid and the script",
            sys.executable,
            "night_beside_script.py",
            *(grid, setting.scratch / "results"),
            *(source.path, prompts, output_tokens, PROMPTS, repeats),
            environment=environment(),
        )
        told = both.turn()
    return lines_of(told["attempts"], told["script"], told["imports_s"]), {
        "model": model,
        "jobs on a warm worker, and on a process of their own": jobs,
        "prompts": PROMPTS,
        "output tokens": output_tokens,
        "passes of a job": repeats,
        "threads of each": THREADS,
    }


def lines_of(
    attempts: Sequence[Mapping[str, Any]],
    script: Sequence[Mapping[str, float]],
    imports_s: float,
) -> list[Line]:
    """Lines of attempts, each between two turns of the script."""
    neighbours = [
        {name: mean(turn[name] for turn in turns) for name in script[0]}
        for turns in pairwise(script)
    ]
    pairs = list(zip(attempts, neighbours, strict=True))
    warm = [pair for pair in pairs if pair[0]["start_s"] is None]
    cold = [pair for pair in pairs if pair[0]["start_s"] is not None]

    def speed(what: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]]) -> Line:
        return Line(
            what=what,
            against="the script",
            unit="tokens/s",
            ours=values([job for job, _ in pairs], "tokens_per_s"),
            theirs=values([script for _, script in pairs], "tokens_per_s"),
            goal=_THE_SAME,
            cpu_ratio=median(
                job["tokens_per_cpu_s"] / script["tokens_per_cpu_s"] for job, script in pairs
            ),
        )

    def cost(what: str, against: str, unit: str, figure: str, theirs: Sequence[float]) -> Line:
        return Line(
            what=what,
            against=against,
            unit=unit,
            ours=values([job for job, _ in cold], figure),
            theirs=tuple(theirs),
            goal=_AS_MUCH,
        )

    in_grid = speed("in the grid, a process that just started", cold)
    warm_in_grid = speed("in the grid, a warm worker", warm)
    pairs_of_both = min(len(cold), len(warm))
    return [
        in_grid,
        warm_in_grid,
        Line(
            what="in the grid, a warm worker, as a share of the script's speed",
            against="a fresh process, as a share of it",
            unit="×",
            # No job of one kind has a turn with the other: the first of both are a pair, and so on.
            ours=warm_in_grid.ratios[:pairs_of_both],
            theirs=in_grid.ratios[:pairs_of_both],
            goal=_THE_SAME,
        ),
        Line(
            what="the script itself, by the same method",
            against="its own turns before and after",
            unit="tokens/s",
            ours=values(script[1:-1], "tokens_per_s"),
            theirs=tuple(
                mean((before["tokens_per_s"], after["tokens_per_s"]))
                for before, after in zip(script[:-2], script[2:], strict=True)
            ),
            note="the difference that the method finds where there is none",
        ),
        cost(
            "peak memory of a worker",
            "the script",
            "MiB",
            "peak_mib",
            [each["peak_mib"] for _, each in cold],
        ),
        Line(
            what="start of a worker's process",
            against="",
            unit="s",
            ours=values([job for job, _ in cold], "start_s"),
            note="forked from a process that has imported the libraries, once per host; the script "
            f"starts in {imports_s:.1f} s and loads the model at first in "
            f"{script[0]['load_s']:.1f} s",
        ),
        Line(
            what="loading the model for another job of a warm worker",
            against="",
            unit="s",
            ours=values([job for job, _ in warm], "load_s"),
            goal=Goal(kind="at most", value=0.0),
        ),
    ]


def _grid(model: str, jobs: int, output_tokens: int, repeats: int) -> str:
    """As many jobs that share a worker as jobs with a process of their own, all the same but for
    how many texts they keep, which makes them jobs apart."""
    shared, alone = list(range(1, jobs + 2)), list(range(jobs + 2, 2 * jobs + 2))
    job = f"workload: text-generation, precision: fp32, batch_size: {PROMPTS}"
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
        f"  - {{name: shared, {job}, axes: {{keep_texts: {shared}}}}}\n"
        f"  - {{name: alone, isolation: process, {job}, axes: {{keep_texts: {alone}}}}}\n"
    )
