"""The time from the command to the first row, beside the bare start of Ray.

Once on a cluster that runs already, started by `ray start` with a node of eight emulated cards,
and once with `--emulate 2x8`, where a cluster has to be started first. On the cluster that runs
already it is measured cold. What Ray needs by itself is measured in the same turn, until one actor
answers: the cluster that runs joined by `ray.init`, a cluster of its own by `ray.init`, and the
same nodes as Nightgrid starts them. The jobs are three of the demonstration's grid; how long the
first of them took on its card is told as well. A row counts once it is in a file; the disk may need
some milliseconds more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.contender import ROOT
from benchmarks.contenders.own_cluster import own_cluster_variables
from benchmarks.figures import Goal, Line
from benchmarks.night import environment
from benchmarks.setting import PROGRAMS, Setting, Takes
from orchestrator.store import files as run_files
from orchestrator.store.store import Store

TITLE = "From the command to the first row"
TAKES_S = Takes(whole=90, quick=62)
NAME = "startup"
CARDS = 8
#: The budgets: on a cluster that runs already, and with emulated nodes, bare start included.
_RUNNING_S, _EMULATED_S = 10.0, 20.0
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds of one command: until its first row was written, and of that row's job alone."""

    first_row_s: float
    job_s: float


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    turns = setting.sized(max(setting.turns, 3), 1, 1)
    grid = _grid(setting.scratch)
    tokens = setting.scratch / "token"
    tokens.mkdir(exist_ok=True)
    variables = environment() | own_cluster_variables(tokens)
    stock, bare, emulated, running, joined = [], [], [], [], []
    spec = f"2x{CARDS}"
    for number in range(turns):
        setting.say(f"  a cluster of its own, turn {number + 1}")
        stock.append(_bare_start_s(variables, "stock"))
        bare.append(_bare_start_s(environment(), spec))
        results = setting.scratch / f"emulated-{number}"
        emulated.append(_start(grid, results, environment(), "--emulate", spec))
    setting.say("  a cluster that runs already")
    with _running_cluster(setting.scratch, variables) as address:
        for number in range(turns):
            joined.append(_bare_start_s(variables, address))
            results = setting.scratch / f"running-{number}"
            running.append(_start(grid, results, variables, "--address", address))
    on_running, on_emulated = (
        Goal(kind="at most", value=most_s) for most_s in (_RUNNING_S, _EMULATED_S)
    )
    lines = [
        Line(
            what="first row on a running cluster",
            against="",
            unit="s",
            ours=tuple(start.first_row_s for start in running),
            goal=on_running,
        ),
        Line(
            what="first row on a running cluster",
            against="joining it by ray.init, and one actor",
            unit="s",
            ours=tuple(start.first_row_s for start in running),
            theirs=tuple(joined),
        ),
        Line(
            what=f"first row on emulated {spec}",
            against="",
            unit="s",
            ours=tuple(start.first_row_s for start in emulated),
            goal=on_emulated,
        ),
        *(
            Line(
                what=f"first row on emulated {spec}",
                against=against,
                unit="s",
                ours=tuple(start.first_row_s for start in emulated),
                theirs=tuple(theirs),
            )
            for against, theirs in (
                ("the bare start of the same nodes, and one actor", bare),
                ("Ray's own bare start: ray.init and one actor", stock),
            )
        ),
    ]
    return lines, {
        "seconds of a job that waited for no turn, running": [round(s.job_s, 2) for s in running],
        "seconds of a job that waited for no turn, emulated": [round(s.job_s, 2) for s in emulated],
    }


def _grid(directory: Path) -> Path:
    """Three jobs of the demonstration's grid."""
    grid = yaml.safe_load((ROOT / "grids" / "smoke.yaml").read_text())
    grid["name"] = NAME
    grid["experiments"][0]["axes"] = {"precision": ["fp32"], "batch_size": [4, 8, 16]}
    path = directory / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump(grid))
    return path


def _start(grid: Path, results: Path, variables: Mapping[str, str], *where: str) -> Start:
    """Run the grid.

    Raises:
        RuntimeError: the run failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", "orchestrator", "run", str(grid), "--quiet", *where]
    safe = results / NAME / run_files.ROWS
    log = results.with_suffix(".log")
    with log.open("w") as out:
        began = time.time()
        driver = subprocess.Popen(
            [*command, "--results", str(results)],
            env=dict(variables),
            stdout=out,
            stderr=out,
            cwd=ROOT,
        )
        first_row_s = 0.0
        try:
            while driver.poll() is None:
                if not first_row_s and _has_row(safe):
                    first_row_s = time.time() - began
                time.sleep(0.01)
        finally:  # all that it has started ends with it
            driver.kill()
            driver.wait()
    if driver.returncode or not first_row_s:
        end = log.read_text()[-1500:]
        raise RuntimeError(f"nightgrid run ended with {driver.returncode}: {end}")
    rows = Store.existing(results, NAME).read().measurements
    took_s = [row.ended_at - row.started_at for row in rows if row.ended_at and row.started_at]
    return Start(first_row_s=first_row_s, job_s=min(took_s))


def _has_row(rows: Path) -> bool:
    """Return whether a row is in a file of this directory."""
    with contextlib.suppress(OSError):  # a log that has just become Parquet
        found = (file for name in ("*.parquet", ".rows-*.jsonl") for file in rows.glob(name))
        return any(file.stat().st_size for file in found)
    return False


def _bare_start_s(variables: Mapping[str, str], cluster: str) -> float:
    """Seconds that Ray needs for a cluster and an actor, without its import."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "bare_ray.py"), cluster],
        env=dict(variables),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return float(done.stdout.split()[-1])


@contextlib.contextmanager
def _running_cluster(directory: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """A head with emulated cards, as `ray start` starts it; its address.

    Raises:
        RuntimeError: it does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cards = {"HPU": CARDS, "emulated": 1, "server_cards": CARDS, "card_memory_mib": 512}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=0"]
    command += [
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--resources={json.dumps(cards)}",
    ]
    log = directory / "ray-start.log"
    with log.open("w") as out:
        head = subprocess.Popen(
            command, env=dict(variables), stdout=out, stderr=out, start_new_session=True
        )
    try:
        until = time.monotonic() + _PATIENCE_S
        while "runtime started" not in log.read_text():
            if head.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no cluster comes up: {log.read_text()[-1500:]}")
            time.sleep(0.2)
        time.sleep(5.0)  # its agents still import
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        try:
            head.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
