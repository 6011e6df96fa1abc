"""Gradient compression between two ranks over gloo: fewer bytes, nearly the same training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

#: A rate at which a changed gradient would show in the losses.
JOB: dict[str, Any] = {"batch_size": 2, "steps": 6, "learning_rate": 1e-2}
FULL: dict[str, Any] = JOB | {"method": "full", "learning_rate": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "none": JOB,
    "fp16": JOB | {"gradient_compression": "fp16"},
    "bf16": JOB | {"gradient_compression": "bf16", "gradient_accumulation": 2},
    "powersgd": JOB | {"gradient_compression": "powersgd", "powersgd_rank": 1},
    "full": FULL,
    "full powersgd": FULL | {"gradient_compression": "powersgd", "steps": 8},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0 measured in each case, all run in one gang of two processes."""
    environment = os.environ | {
        "NIGHTGRID_CACHE": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(HERE / "gang_rank.py"), json.dumps([[2, CASES]])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])[0][0]
    return found


def numbers(measured: dict[str, dict[str, Any]], case: str) -> tuple[int, int]:
    """How much was sent, and for how much."""
    sent, given = re.findall(r"(\d+) (?:bytes|numbers) sent for (\d+)", _said(measured, case))[0]
    return int(sent), int(given)


def _said(measured: dict[str, dict[str, Any]], case: str) -> str:
    return str(measured[case]["details"].get("gradient_compression", ""))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp16", "bf16"])
def test_sixteen_bits_halve_the_bytes_and_keep_the_curve(
    measured: dict[str, dict[str, Any]], case: str
) -> None:
    """Gradients go through the hook, in 16 bits; losses stay near those without."""
    sent, given = numbers(measured, case)
    assert sent * 2 == given > 0
    assert measured[case]["losses"] == pytest.approx(measured["none"]["losses"], rel=2e-3)
    assert _said(measured, "none") == ""


@pytest.mark.slow
def test_powersgd_sends_thin_matrices(measured: dict[str, dict[str, Any]]) -> None:
    """It begins after two exchanges, which are exact, sends far less, and learns."""
    for case, plain in (("powersgd", "none"), ("full powersgd", "full")):
        sent, given = numbers(measured, case)
        assert 0 < sent < given / 2
        losses, exact = measured[case]["losses"], measured[plain]["losses"]
        assert losses[:3] == pytest.approx(exact[:3], rel=1e-5)
        assert losses[3:6] != pytest.approx(exact[3:6], rel=1e-7)
        assert losses[:6] == pytest.approx(exact[:6], rel=5e-2)
        assert losses[-1] < losses[0]
