"""Rows of jobs that a script of this directory runs in a process of its own, under the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from patience import patience

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent


def rows_of(script: str, *arguments: str | Path, **variables: str) -> dict[str, Any]:
    """The rows that the script printed, in lazy mode unless the variables say otherwise."""
    folders = [TESTS.parent, TESTS, TESTS / "workloads", os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PT_HPU_LAZY_MODE": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=patience(500),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    found: dict[str, Any] = json.loads(line.removeprefix("ROWS "))
    return found
