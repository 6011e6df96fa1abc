"""DeepSpeed's own setting of torch, made once in a process, is that of each of its jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # loads DeepSpeed

ROOT = Path(__file__).resolve().parents[3]

_TWO_JOBS = """
import sys, torch
from workloads.isolation import ProcessState
from workloads.training.parallel.deepspeed import use_its_algorithms
clean, used = ProcessState.now(), []
for job in range(2):
    clean.restore()
    import deepspeed  # alone it speaks once
    alone = torch.are_deterministic_algorithms_enabled()
    used.append((alone, use_its_algorithms(), torch.are_deterministic_algorithms_enabled()))
clean.restore()
print(used, torch.are_deterministic_algorithms_enabled(), file=sys.stderr)
"""


def test_every_job_with_deepspeed_on_gaudi_has_deterministic_algorithms() -> None:
    """With DeepSpeed's own accelerator for Gaudi: the first job and the second have them, others
    have not. Without being asked, only the first would."""
    pytest.importorskip("deepspeed")
    paths = [str(ROOT / "tests" / "gaudi" / "standin"), str(ROOT)]
    environment = {**os.environ, "DS_ACCELERATOR": "hpu", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", _TWO_JOBS], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stderr.strip().splitlines()[-1]
    assert told == "[(True, True, True), (False, True, True)] False"
