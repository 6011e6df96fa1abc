"""The page of a run of 100,000 rows: seconds, CPU and memory.

The rows are those that an H100 measured (``results/h100/grids.parquet``), over and over, each time
as jobs of another experiment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.contender import ROOT
from benchmarks.figures import Goal, Line
from benchmarks.setting import Setting, Takes
from orchestrator.store.codec import measurements_of
from orchestrator.store.store import Store

TITLE = "The page of 100,000 rows"
TAKES_S = Takes(whole=40, quick=None)
RUN = "many"


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    rows = setting.sized(100_000, 20_000, 500)
    # In a process of its own: what a parent holds counts to the peak of a command that it starts.
    command = [sys.executable, "-m", "benchmarks.reports", str(setting.scratch), str(rows)]
    subprocess.run(command, check=True)
    took = _measured(["report", RUN, "--results", str(setting.scratch), "--format", "html"])
    names, units = ("seconds", "CPU", "memory"), ("s", "s", "GB")
    goals = [Goal(kind="at most", value=value) for value in (20, 20, 0.6)]
    lines = [
        Line(what=name, against="", unit=unit, ours=(value,), goal=goal)
        for name, value, unit, goal in zip(names, took, units, goals, strict=True)
    ]
    return lines, {"rows": rows}


def write_rows(results: Path, count: int) -> None:
    """A run of so many rows."""
    table = pq.read_table(ROOT / "results" / "h100" / "grids.parquet")
    measured = list(measurements_of(table))
    with Store(results, RUN) as store:
        for number in range(-(-count // len(measured))):
            copies = [
                replace(
                    row,
                    run=RUN,
                    experiment=f"copy-{number}",
                    job_id=f"{number:04x}{row.job_id[4:]}",
                    attempt_id=f"{number:04x}{row.attempt_id[4:]}",
                )
                for row in measured[: count - number * len(measured)]
            ]
            store.append(*copies)


def _measured(arguments: list[str]) -> tuple[float, float, float]:
    """Seconds, CPU seconds and the peak of resident memory (GB) of one command."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "orchestrator", *arguments]
    output = os.open(os.devnull, os.O_WRONLY)
    pid = os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, output, 1)]
    )
    os.close(output)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    seconds = time.perf_counter() - started
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]), int(sys.argv[2]))
