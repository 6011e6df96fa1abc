"""`nightgrid run` on cards of this machine, for benchmarks that measure a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.contender import ALLOCATOR, ROOT
from orchestrator.core.measurement import Measurement
from orchestrator.store.store import Store

#: Of every contender beside a run. One core stays with what else runs: Ray's daemons here, a parent
#: that waits for its child without a pause elsewhere; two threads that wait for each other at every
#: product would measure those instead.
THREADS = 1


def environment() -> dict[str, str]:
    """For a command that computes: so many threads, the allocator settings of every contender, and
    nothing from the network. It may keep what it compiles of itself, as installed programs have."""
    return (
        {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        | ALLOCATOR
        | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(THREADS),
            "MKL_NUM_THREADS": str(THREADS),
            "NIGHTGRID_THREADS": str(THREADS),
            "HF_HUB_OFFLINE": "1",
        }
    )


def timed(
    name: str,
    *command: str | Path,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> float:
    """Seconds that a command takes in ``environment``, with ``variables`` besides.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    began = time.perf_counter()
    env = environment() | dict(variables or {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    took_s = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-1500:]}")
    return took_s


def night(
    grid: Path,
    name: str,
    results: Path,
    python: str = sys.executable,
    *,
    emulate: str = "1x1:CPU",
    variables: Mapping[str, str] | None = None,
) -> tuple[float, tuple[Measurement, ...]]:
    """Seconds that the command takes, and the rows of the run, which the grid calls ``name``.

    Raises:
        RuntimeError: a job failed, or the run; or workers had another number of threads.
    """
    options = ("--emulate", emulate, "--results", results, "--quiet")
    command = (python, "-m", "orchestrator.cli.main", "run", grid, *options)
    took_s = timed("nightgrid run", *command, variables=variables)
    rows = Store.existing(results, name).read().measurements
    check_threads(rows)
    return took_s, tuple(rows)


def check_threads(rows: Iterable[Measurement]) -> None:
    """Let rows pass whose workers had as many threads as every other contender.

    Raises:
        RuntimeError: one had another number.
    """
    if wrong := {row.threads for row in rows if row.started_at is not None} - {THREADS}:
        raise RuntimeError(f"workers had {wrong} threads and not {THREADS}")
