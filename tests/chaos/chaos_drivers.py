"""The drivers of a night, started, killed and resumed as a user would do it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_clock import SteppedClock
from chaos_cluster import ROOT, ChaosCluster

RUN = "night"
_GONE_WITHIN_S = 20.0
_REFUSED_WITHIN_S = 90.0
_LOOK_S = 0.1


@dataclass(slots=True, kw_only=True)
class Drivers:
    """Starts `nightgrid run` for one grid, again and again. What each prints goes to a file in
    ``log_dir``, which may be a small disk, as may ``results``."""

    cluster: ChaosCluster
    grid: Path
    results: Path
    log_dir: Path
    clock: SteppedClock | None = None  # theirs alone, not that of the cluster
    outputs: list[Path] = field(default_factory=list)
    process: subprocess.Popen[bytes] = field(init=False)  # the one that was started last

    @property
    def run(self) -> Path:
        return self.results / RUN

    def command(self, *more: str, results: Path | None = None) -> list[str]:
        return [
            *(sys.executable, str(ROOT / "tests" / "chaos" / "chaos_run.py"), "run"),
            *(str(self.grid), "--address", self.cluster.address),
            *("--results", str(results or self.results), "--run", RUN, *more),
        ]

    def start(self, *more: str) -> None:
        output = self.log_dir / f"driver-{len(self.outputs) + 1}.log"
        self.outputs.append(output)
        clock = self.clock.environment() if self.clock is not None else {}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                self.command(*more),
                env=self.cluster.environment() | clock,
                cwd=self.grid.parent,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def working_pid(self, process: subprocess.Popen | None = None) -> int | None:
        """The process that holds the run: the one that was started last, or another that is named,
        or a child of it that it watches. None while there is none, or the lock does not say."""
        try:
            pid = int(json.loads((self.run / "driver.lock").read_bytes())["pid"])
            holder = psutil.Process(pid)
            if holder.status() == psutil.STATUS_ZOMBIE:
                return None
            family = (pid, *(parent.pid for parent in holder.parents()))
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            return None  # one that a fault garbled, a list nested 5,000 deep among them
        except psutil.Error:
            return None
        return pid if (process or self.process).pid in family else None

    def kill(self) -> int | None:
        """``kill -9`` of what was started, at any moment; whom that was the end of, once it is
        gone."""
        working = self.working_pid()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + _GONE_WITHIN_S
        while working is not None and psutil.pid_exists(working):
            if time.monotonic() > deadline:
                raise TimeoutError(f"driver {working} outlived what started it")
            time.sleep(0.01)
        return working

    def kill_child(self) -> int | None:
        """``kill -9`` of the driver alone, if another process watches it; its id."""
        working = self.working_pid()
        if working is None or working == self.process.pid:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(working, signal.SIGKILL)
        return working

    def nightgrid(self, *arguments: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments],
            env=self.cluster.environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )

    def rival(self) -> subprocess.CompletedProcess | None:
        """The same command again, to its end; None if it got the run, as it may when the one before
        has just ended, and is ended itself before it has started anything. Raises
        subprocess.TimeoutExpired."""
        with subprocess.Popen(
            self.command(),
            env=self.cluster.environment(),
            cwd=self.grid.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            began = time.monotonic()
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        out, err = process.communicate(timeout=_LOOK_S)
                        code = process.returncode
                        return subprocess.CompletedProcess(process.args, code, out, err)
                    if self.working_pid(process) is not None:
                        return None
                    if time.monotonic() - began > _REFUSED_WITHIN_S:
                        raise subprocess.TimeoutExpired(process.args, _REFUSED_WITHIN_S)
            finally:
                process.kill()  # what it watches dies with it

    def tail(self) -> str:
        return self.outputs[-1].read_text(errors="replace")[-3000:]

    def had_no_head(self) -> bool:
        text = self.outputs[-1].read_text(errors="replace")
        return self.process.poll() == 3 and "no Ray cluster answers at" in text

    def had_no_room(self) -> bool:
        text = self.outputs[-1].read_text(errors="replace")
        return (
            self.process.poll() == 4
            and "No space left on device" in text
            and "starting on " not in text
        )
