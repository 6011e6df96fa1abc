"""A benchmark that is ended takes its contenders along, with what these have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import alive, until

from benchmarks.contender import ROOT, Contender

#: `python -m benchmarks command_line`, with another benchmark in the place of that one: a turn of
#: its contender lasts for ever.
BENCHMARK = """
import runpy, sys, types
from benchmarks.contender import Contender
from benchmarks.setting import Takes

def run(setting):
    command = [sys.executable, "-c", contender, told]
    with Contender("endless", command, setting.scratch / "log") as endless:
        endless.turn()

contender, told, scratch = sys.argv[1:]
stub = types.ModuleType("benchmarks.command_line")
stub.TITLE, stub.TAKES_S, stub.run = "Endless", Takes(whole=1, quick=1), run
sys.modules["benchmarks.command_line"] = stub
sys.argv = ["benchmarks", "command_line", "--smoke", "--results", scratch, "--scratch", scratch]
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""
#: A contender with a child, whose turn ends with it or not.
CONTENDER = """
import os, subprocess, sys
from pathlib import Path
from benchmarks.contender import serve

def turn():
    child = subprocess.Popen(["sleep", "600"])
    told = Path(sys.argv[1])
    told.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    told.with_suffix(".part").rename(told)
    if sys.argv[2:] != ["ends"]:
        child.wait()
    return {"work": 1}

serve(turn)
"""


def _gone(told: Path) -> bool:
    return not any(alive(int(pid)) for pid in told.read_text().split())


@contextlib.contextmanager
def _benchmark(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A benchmark in the midst of its contender's turn."""
    told = tmp_path / "told"
    command = [sys.executable, "-c", BENCHMARK, CONTENDER, str(told), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup

    with (tmp_path / "output").open("w") as output:
        benchmark = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, preexec_fn=prepare
        )
    try:
        assert until(told.exists, 30), (tmp_path / "output").read_text()
        yield benchmark
    finally:
        benchmark.kill()
        benchmark.wait()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_ended_ends_its_contender(number, tmp_path) -> None:
    with _benchmark(tmp_path) as benchmark:
        benchmark.send_signal(number)
        assert until(lambda: benchmark.poll() is not None, 30)
        assert benchmark.returncode == 128 + number
        assert until(lambda: _gone(tmp_path / "told"), 10)


def test_a_contender_that_waits_costs_the_others_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """It is stopped with what it has started, until its next turn begins, and ended at last."""

    def state(pid: str) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    told = tmp_path / "told"
    command = [sys.executable, "-c", CONTENDER, str(told), "ends"]
    with Contender("short", command, tmp_path / "log") as short:
        assert short.turn()["work"] == 1
        pids = told.read_text().split()
        assert until(lambda: [state(pid) for pid in pids] == ["T", "T"], 10)  # by a signal
        short.turn()
        assert short.turns[1]["wall_s"] < 5
        assert until(lambda: state(pids[0]) == "T", 10)
        assert not _gone(told)
    assert until(lambda: _gone(told), 10)
