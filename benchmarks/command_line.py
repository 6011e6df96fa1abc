"""The time that the command line thinks: ``nightgrid --help``, and the plan of 10,000 jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import Goal, Line
from benchmarks.setting import Setting, Takes

TITLE = "The command line"
TAKES_S = Takes(whole=5, quick=5)


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    jobs = 40 if setting.smoke else 10_000
    grid = setting.scratch / "grid.yaml"
    grid.write_text(grid_of(jobs))
    commands = {
        "nightgrid --help": ["--help"],
        f"nightgrid plan, {jobs:,} jobs": [
            *("plan", str(grid), "--emulate", "4x8", "--results", str(setting.scratch / "results"))
        ],
    }
    wall: dict[str, list[float]] = {name: [] for name in commands}
    cpu: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(1 if setting.smoke else 5):
        for name, arguments in commands.items():
            took = _timed(arguments, setting.scratch)
            wall[name].append(took[0])
            cpu[name].append(took[1])
    limits = dict(zip(commands, (0.3, 1.0), strict=True))
    lines = [
        Line(
            what=name,
            against="",
            unit="s",
            ours=tuple(wall[name]),
            goal=Goal(kind="at most", value=limits[name]),
            note=f"{min(cpu[name]):.2f} s of CPU at least",
        )
        for name in commands
    ]
    return lines, {"jobs of the grid": jobs}


def _timed(arguments: list[str], scratch: Path) -> tuple[float, float]:
    """Seconds of wall and of CPU that a command takes, interpreter and all."""
    # A program that was used before has its bytecode, unless somebody's environment forbids it.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "orchestrator.cli.main", *arguments]
    before, began = os.times(), time.perf_counter()
    with (scratch / "output").open("w") as output:
        subprocess.run(command, stdout=output, env=environment, check=True)
    took, after = time.perf_counter() - began, os.times()
    used = after.children_user + after.children_system
    return took, used - before.children_user - before.children_system


def grid_of(jobs: int) -> str:
    """A grid of so many one-card jobs, a multiple of 40: precisions, batch sizes and lengths."""
    lengths = ", ".join(str(length) for length in range(1, jobs // 40 + 1))
    return (
        "name: ten-thousand\n"
        "experiments:\n"
        "  - name: one\n"
        "    workload: text-generation\n"
        "    model: tiny-chatglm3\n"
        "    dataset: advertisegen-synthetic\n"
        "    axes:\n"
        "      precision: [fp32, bf16, int8, int4]\n"
        "      batch_size: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]\n"
        f"      output_tokens: [{lengths}]\n"
    )
