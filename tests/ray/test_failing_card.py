"""A night on emulated cards, one of which fails every job that it gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import started
from outside_device import offer
from patience import patience

from orchestrator.core.job import State
from orchestrator.store.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.slow]

#: A worker's log has the name of its card.
WORKLOAD = """
import os, time
from workloads.base import Result, Sample
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters, setting

class Parameters(WorkloadParameters):
    number: int = setting(0, role="work", description="Tells jobs apart.")

SPEC = WorkloadSpec(name="sick", function="sick_card:run", parameters=Parameters, summary="-")

def run(request, context):
    time.sleep(0.3)
    if "HPU1" in os.readlink("/proc/self/fd/2"):
        raise RuntimeError("CUDA_VERSION of this card is odd")  # an error of no known class
    sample = dict(batch=0, warmup=False, complete=True, wall_s=0.1, cpu_s=0.0, items=1)
    tokens = dict(input_tokens=1, output_tokens=0, computed_tokens=1)
    samples = tuple(Sample(repeat=repeat, **sample, **tokens) for repeat in range(3))
    return Result(samples=samples, stop_reason="max_repeats")
"""
GRID = """
name: sick
experiments:
  - {name: e, workload: sick, model: tiny-chatglm3, accelerator: HPU, axes: {number: NUMBERS}}
"""


def test_a_card_that_fails_every_job_is_named_and_the_night_succeeds(tmp_path: Path) -> None:
    (tmp_path / "sick_card.py").write_text(WORKLOAD)
    offer(tmp_path, {"sick": "sick_card:SPEC"}, "nightgrid.workloads")
    (tmp_path / "grid.yaml").write_text(GRID.replace("NUMBERS", str(list(range(24)))))
    options = ("--emulate", "1x3:HPU", "--no-restart")
    night = started("run", "grid.yaml", *options, cwd=tmp_path)
    output, _ = night.communicate(timeout=patience(120))
    assert night.returncode == 0, output
    rows = Store.existing(tmp_path / "results", "sick").measurements()
    failed = [row for row in rows if row.state is State.FAILED]
    assert failed and all(row.card_indices == (1,) for row in failed)
    assert len(failed) <= 4, "the card is quarantined"
    worked = {row.job_id: row.reason for row in rows if row.state is State.SUCCEEDED}
    assert len(worked) == 24
    assert {worked[row.job_id] for row in failed} == {"measured; it failed on hpu-1/HPU1"}
    assert "Cards on which jobs failed that worked elsewhere" in output
