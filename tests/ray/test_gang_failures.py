"""A rank of a training gang is killed, then one is stopped, on real emulated cards: the gang ends
with the reason, nothing is left behind, and the job is run again on cards that are free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patience

from orchestrator.domain.job import State
from orchestrator.results.store import Store
from orchestrator.runtime.status import RunStatus

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
GRID = """\
name: gang
experiments:
  - name: gang
    workload: finetuning
    model: tiny-chatglm3
    accelerator: HPU
    cards: 2
    precision: fp32
    batch_size: 2
    strategy: ddp
    steps: 80
    samples: 64
    max_length: 48
    measure: {warmup: 1, warmup_limit_s: 1, time_limit_s: 600}
"""
OPTIONS = ("--emulate", "1x4:HPU", "--no-restart")


def worker_pids(directory: Path) -> dict[str, int]:
    """Worker processes that log under ``directory``: name of the log -> process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                log = Path(os.readlink(entry / "fd" / "1"))
            except OSError:
                continue
            if log.is_relative_to(directory) and log.name.startswith("hpu-1-HPU"):
                found[log.name] = int(entry.name)
    return found


def alive(pids: dict[str, int]) -> list[int]:
    return [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]


class Training:
    """The run, watched through its status file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "grid.yaml").write_text(GRID)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        with (directory / "output.txt").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", "run", "grid.yaml", *OPTIONS],
                cwd=directory,
                env=environment | {"PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.directory / "output.txt").read_text()

    def workers_in_measure(self, attempt: int) -> dict[str, int]:
        """The processes of an attempt's ranks, once both are in the timed part."""
        status = self.directory / "results/gang/status.json"
        deadline = time.monotonic() + patience(150)
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output
            if status.exists():
                cards = RunStatus.from_json(status.read_text()).cards
                busy = [c for c in cards if c.attempt_id.endswith(f"-{attempt}")]
                if len(busy) == 2 and all(card.phase == "measure" for card in busy):
                    names = [card.card.replace("/", "-") for card in busy]
                    pids = worker_pids(self.directory)
                    return {
                        log: pid
                        for log, pid in sorted(pids.items())
                        if any(log.startswith(f"{name}-") for name in names)
                    }
            time.sleep(0.1)
        raise AssertionError(f"attempt {attempt} was not measured in time: {self.output}")


def test_a_killed_and_a_stopped_rank_end_their_gang_and_the_job_goes_on(tmp_path: Path) -> None:
    """kill -9 on one rank: a row within seconds that names the signal and what became of the
    other. A rank that a signal has stopped: noticed by the state of its process, long before any
    time limit. The third attempt succeeds."""
    run = Training(tmp_path)
    try:
        first = run.workers_in_measure(1)
        assert len(first) == 2, first
        os.kill(list(first.values())[1], signal.SIGKILL)
        killed_at = time.time()
        second = run.workers_in_measure(2)
        assert len(second) == 2 and not alive(first)
        os.kill(next(iter(second.values())), signal.SIGSTOP)
        stopped_at = time.time()
        assert run.process.wait(patience(200)) == 0, run.output
    finally:
        run.process.kill()
    assert not alive(second)
    rows = Store.existing(tmp_path / "results", "gang").measurements()
    killed, stopped, succeeded = sorted(rows, key=lambda row: row.attempt_number)

    assert killed.state is State.FAILED and not killed.final
    assert killed.failure_class == "crash" and "SIGKILL" in killed.reason
    assert killed.ended_at is not None and killed.ended_at < killed_at + patience(10)
    ranks = killed.details["ranks"].split("; rank")
    assert "SIGKILL" in ranks[1] and ranks[0].startswith("rank 0")
    assert not ranks[0].startswith("rank 0 SUCCEEDED")

    assert stopped.failure_class == "hang" and not stopped.final
    assert "stopped by a signal" in stopped.reason
    assert stopped.ended_at is not None and stopped.ended_at < stopped_at + patience(30)

    assert succeeded.state is State.SUCCEEDED and succeeded.final
    assert {rank for rank, _ in succeeded.samples} == {0, 1}
    assert succeeded.details["strategy"] == "ddp"
    assert worker_pids(tmp_path) == {}
