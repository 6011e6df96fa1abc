"""Liger's own kernels: on a card where there is one, else by Triton's interpreter, on the CPU.

Skipped where liger-kernel is not installed; `make test` does not install it, since it needs triton.
In an environment of one's own: pip install -c constraints.txt 'nightgrid[liger]' pytest
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parents[1]
#: The largest difference by the bits of a format, relative to the largest element of its tensor.
NEAR = {"fp32": 1e-5, "fp16": 0.01, "bf16": 0.05}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a minute of one core by the interpreter
    pytest.mark.skipif(
        importlib.util.find_spec("liger_kernel") is None,
        reason="liger-kernel is not installed: pip install 'nightgrid[liger]'",
    ),
]


def test_losses_and_gradients_are_those_of_plain_code() -> None:
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(HERE / "liger_equality.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    measured: dict[str, Any] = json.loads(done.stdout)
    models = {name: case for name, case in measured.items() if isinstance(case, list)}
    assert len(models) == 12 and all(len(parts) == 3 for _, parts in models.values())
    distances = {name: distance for name, (distance, _) in models.items()}
    distances |= {name: case for name, case in measured.items() if name.startswith("loss")}
    assert len(distances) == 12 + 8
    assert not {n: apart for n, apart in distances.items() if not apart < NEAR[n.split()[-1]]}
