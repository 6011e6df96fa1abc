"""A workload that does nothing, for the product's own workers: what is left is their own cost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from workloads.api import JobContext, Request, Result, Sample
from workloads.metrics import SAMPLES
from workloads.parameters import WorkloadParameters
from workloads.workloads.base import WorkloadSpec

SPEC = WorkloadSpec(
    name="noop",
    function=f"{__name__}:run",
    parameters=WorkloadParameters,
    summary="Nothing.",
    ability="generate",
    tasks=("causal-lm",),
    throughput=SAMPLES,
)


def run(request: Request, context: JobContext) -> Result:
    """Do nothing, in the phases that a job has, and say that it took a second."""
    context.enter_phase("load")
    context.enter_phase("measure")
    sample = Sample(
        repeat=0,
        batch=0,
        warmup=False,
        complete=True,
        wall_s=1.0,
        cpu_s=0.0,
        items=1,
        input_tokens=1,
        output_tokens=1,
        computed_tokens=1,
    )
    return Result(samples=(sample,), stop_reason="max_repeats", synthetic_data=True)


def offer_workload(directory: Path) -> None:
    """Have this process, and those that it starts, find the workload as an installed package's."""
    information = directory / "noop-1.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Name: noop\nVersion: 1\n")
    points = f"[nightgrid.workloads]\nnoop = {__name__}:SPEC\n"
    (information / "entry_points.txt").write_text(points)
    sys.path.insert(0, str(directory))
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{before}" if before else str(directory)
