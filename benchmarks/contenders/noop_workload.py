"""A workload that does nothing, for the product's own workers: what is left is their own cost."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.contender import ROOT
from workloads.base import (
    SAMPLES,
    JobContext,
    Request,
    Result,
    Sample,
)
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters

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


def offer_workload(directory: Path) -> str:
    """Write the workload down as an installed package's, for processes with the PYTHONPATH that is
    returned."""
    information = directory / "noop-1.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Name: noop\nVersion: 1\n")
    points = f"[nightgrid.workloads]\nnoop = {__name__}:SPEC\n"
    (information / "entry_points.txt").write_text(points)
    return os.pathsep.join(map(str, (directory, ROOT)))
