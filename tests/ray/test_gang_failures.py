"""A rank of a training gang is killed, then one is stopped: the job goes on from its checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from command_line import started
from patience import alive, patience

from orchestrator.core.job import State
from orchestrator.core.status import CardStatus, RunStatus
from orchestrator.grid.parser import parse_grid
from orchestrator.store.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID = """\
name: gang
defaults:
  workload: finetuning
  model: tiny-chatglm3
  accelerator: HPU
  cards: 2
  precision: fp32
  batch_size: 2
  strategy: ddp
  steps: 24
  samples: 64
  max_length: 48
measure: {warmup: 1, warmup_limit_s: 1, time_limit_s: 600}
experiments:
  - {name: gang, save_every: 2, save_mode: incremental}
"""
OPTIONS = ("--emulate", "1x4:HPU", "--no-restart")


def worker_pids(directory: Path) -> dict[str, int]:
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


class Training:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "grid.yaml").write_text(GRID)
        self.job_id = parse_grid(GRID.encode(), "grid.yaml").jobs()[0].job_id
        kept = {"NIGHTGRID_CHECKPOINTS": str(directory)}
        self.process = started("run", "grid.yaml", *OPTIONS, cwd=directory, **kept)

    def workers_that_saved(self, attempt: int, step: int) -> dict[str, int]:
        status = self.directory / "results/gang/status.json"
        deadline = time.monotonic() + patience(150)
        found: dict[str, int] = {}
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()[0]
            if len(found) == 2 and min(self.saved(rank) for rank in range(2)) > step:
                return found
            if len(found) < 2 and status.exists():
                cards = RunStatus.from_json(status.read_text()).cards
                names = [card.card.replace("/", "-") for card in cards if self.is_of(card, attempt)]
                found = {
                    log: pid
                    for log, pid in sorted(worker_pids(self.directory).items())
                    if any(log.startswith(f"{name}-") for name in names)
                }
            time.sleep(0.02)
        raise AssertionError(f"attempt {attempt} saved nothing in time")

    def is_of(self, card: CardStatus, attempt: int) -> bool:
        return card.attempt_id == f"{self.job_id}-{attempt}"

    def saved(self, rank: int) -> int:
        files = self.directory.glob(f"nightgrid-checkpoints*/*/step-*.rank-{rank}.pt")
        return max((int(file.name[5:13]) for file in files), default=-1)


def test_a_killed_and_a_stopped_rank_end_their_gang_and_the_job_goes_on(tmp_path: Path) -> None:
    """kill -9 on one rank: a row within seconds that names the signal and what became of the
    other. A rank that a signal has stopped: noticed by the state of its process, long before any
    time limit. The third attempt goes on where that one was; that it learns what an undisturbed job
    learns is seen where strategies are tested."""
    run = Training(tmp_path)
    try:
        first = run.workers_that_saved(1, 2)
        os.kill(list(first.values())[1], signal.SIGKILL)
        killed_at = time.time()
        left = run.saved(1)
        second = run.workers_that_saved(2, left)
        assert not any(map(alive, first.values()))
        os.kill(next(iter(second.values())), signal.SIGSTOP)
        stopped_at = time.time()
        output, _ = run.process.communicate(timeout=patience(200))
        assert run.process.returncode == 0, output
    finally:
        run.process.kill()
    assert not any(map(alive, second.values()))
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
    before = [*map(float, succeeded.details["losses_before"].split())]
    assert len(before) > left >= 3
    assert succeeded.details["resumed"] == f"from step {len(before)} of 25"
    learned = [sample.loss for rank, sample in succeeded.samples if rank == 0]
    assert len(before) + len(learned) in (24, 25)  # a warm-up that the limit cuts has no step
    assert learned[-1] < before[0]
    assert worker_pids(tmp_path) == {}
