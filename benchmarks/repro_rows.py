"""Rows of every workload, each run again by its ``nightgrid repro`` folder in a fresh process.

    python -m benchmarks.repro_rows --json OUT          measures GRID on this machine first, twice
    python -m benchmarks.repro_rows RUN --results DIR   rows of a run that is there

Prints the share of rows whose second figure lies in the interval that the folder expects (one in a
hundred lies outside by chance; two runs show how processes differ), and what `nightgrid compare`
says of all together, which learns from them how processes differ. A loaded host slows the second
process or the first; the load is printed beside each row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from orchestrator.analysis.rankings import doubt_of
from orchestrator.analysis.ratio import Rate, between_runs, rate_of, ratio_of, significant
from orchestrator.analysis.selection import newest_final
from orchestrator.api import Grid, load, run
from orchestrator.core.errors import NotComparable
from orchestrator.core.measurement import Measurement
from orchestrator.software.repro import SCRIPT, folder_of, rows_of_runs, write_folder
from workloads.util.statistics import student_t_quantile

#: Jobs of every workload that measures, for the processor: 22 rows.
GRID = """\
name: repro-rows
defaults: {accelerator: CPU, precision: fp32, threads: 1}
measure: {min_repeats: 5, max_repeats: 10, time_limit_s: 20}
experiments:
  - name: generation
    workload: text-generation
    model: tiny-chatglm3
    prompts: 16
    axes: {engine: [transformers, graph], precision: [fp32, bf16], batch_size: [1, 4]}
  - name: encoding
    workload: text-encoding
    model: tiny-bert
    dataset: english-prompts
    axes: {batch_size: [1, 8, 32], max_length: [64, 128]}
  - name: finetuning
    workload: finetuning
    model: tiny-chatglm3
    steps: 20
    axes: {method: [lora, full]}
  - name: pretraining
    workload: pretraining
    model: tiny-bert
    dataset: english-corpus-synthetic
    steps: 20
    axes: {batch_size: [4, 8]}
  - name: images
    workload: text-to-image
    model: tiny-stable-diffusion
    dataset: image-prompts
    axes: {batch_size: [1, 2]}
  - name: serving
    workload: serving
    model: tiny-chatglm3
    engine: graph
    axes: {concurrency: [1, 4]}
"""
LIMIT_S = 1800.0
_PRINTED = re.compile(
    r"^(?P<again>\S+) (?P<unit>\S+)(?: ± (?P<half>\S+)%)? in (?P<repeats>\d+) repeats: "
    r"(?P<verdict>inside|OUTSIDE) what was expected, (?P<low>\S+) to (?P<high>\S+)$",
    re.M,
)


def spread(rows: Iterable[Measurement], count: int) -> list[Measurement]:
    """Choose rows that a folder can repeat, of each workload and engine in turn."""
    groups: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for row in rows:
        try:
            folder_of(row)
        except NotComparable as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            groups[row.workload, row.engine].append(row)
    turns = chain.from_iterable(zip_longest(*groups.values()))
    return [row for row in turns if row is not None][:count]


def repeated(row: Measurement, history: Iterable[Measurement]) -> dict[str, Any]:
    """Run a row's folder in a fresh process; its figure, the interval, and the verdict."""
    known: dict[str, Any] = {"job_id": row.job_id, "workload": row.workload, "engine": row.engine}
    known |= {"measured": row.metrics.throughput, "load_before": row.host_load}
    known["bound"] = bool(doubt_of(row).better_by)
    with tempfile.TemporaryDirectory() as directory:
        write_folder(row, Path(directory), history)
        path = os.pathsep.join(filter(None, sys.path))
        root = str(Path(__file__).resolve().parents[1])
        try:
            done = subprocess.run(
                [sys.executable, SCRIPT],
                cwd=directory,
                env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{path}"},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return known | {"verdict": "failed", "reason": f"no end after {LIMIT_S:.0f} s"}
    printed = _PRINTED.search(done.stdout)
    if printed is None:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        return known | {"verdict": "failed", "reason": " ".join(last)}
    figures = {name: float(printed[name]) for name in ("again", "low", "high")}
    half = float(printed["half"]) / 100 if printed["half"] else None
    figures_of_repeats = {"half": half, "repeats": int(printed["repeats"]), "unit": printed["unit"]}
    verdict = {"verdict": printed["verdict"].lower(), "load": os.getloadavg()[0]}
    return known | figures | figures_of_repeats | verdict


def compared(rows: Iterable[tuple[Measurement, dict[str, Any]]]) -> str:
    """Judge all rows that are no bounds together, as `nightgrid compare` judges two runs."""
    pairs = []
    for row, answer in rows:
        before = rate_of(row)
        if before is None or answer["bound"] or "again" not in answer:
            continue
        degrees, half, error = answer["repeats"] - 1, answer["half"], None
        if half is not None and degrees > 0:
            error = half / student_t_quantile((1 + row.measure.confidence) / 2, degrees)
        pairs.append((before, Rate(value=answer["again"], error=error, degrees=degrees)))
    noise, degrees = between_runs(pairs)
    ratios = [ratio_of(b, a, noise=noise, noise_degrees=degrees) for a, b in pairs]
    differ = sum(significant([ratio.p_value for ratio in ratios], 0.05))
    return (
        f"compare: {differ} of {len(pairs)} differ significantly, with a noise of {noise:.1%} "
        "between processes"
    )


def main() -> None:
    """Repeat rows and print each, and how many lie inside."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", help="default: measure the benchmark's own grid")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--count", type=int, default=20, help="rows to repeat (default: 20)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if args.run is None:
        grid = Grid.from_text(GRID)
        run(grid, name=f"{grid.name}-before", emulate="1x1:CPU", results=args.results)
        night = run(grid, emulate="1x1:CPU", results=args.results)
    else:
        night = load(args.run, results=args.results)
    history = rows_of_runs(args.results)
    rows, answers = spread(newest_final(night.attempts), args.count), []
    for row in rows:
        answer = repeated(row, history)
        answers.append(answer)
        figures = " ".join(f"{name}={value}" for name, value in answer.items())
        print(figures, flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    inside = sum(answer["verdict"] == "inside" for answer in answers)
    bounds = sum(answer["bound"] for answer in answers)
    wide = f"; {bounds} are lower bounds, since others took their processor" if bounds else ""
    print(f"{inside} of {len(answers)} rows were reproduced inside their intervals{wide}")
    print(compared(zip(rows, answers, strict=True)))


if __name__ == "__main__":
    main()
