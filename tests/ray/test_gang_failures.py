"""A rank of a training gang is killed, then one is stopped: the job goes on from its checkpoint.
Jobs that take its adapter come after it, and are interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from command_line import Nightgrid, started
from patience import alive, commands_naming, patience, until

from orchestrator.core.job import State
from orchestrator.core.status import RunStatus
from orchestrator.grid.parser import parse_grid
from orchestrator.store.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID = """\
name: gang
defaults: {model: tiny-chatglm3, accelerator: HPU, precision: fp32}
measure: {warmup: 1, warmup_limit_s: 1, time_limit_s: 600}
experiments:
  - name: gang
    workload: finetuning
    cards: 2
    batch_size: 2
    strategy: ddp
    steps: 24
    samples: 64
    max_length: 48
    save_every: 2
    save_mode: incremental
    save_adapter: gang
  - name: long
    workload: text-generation
    adapter: gang
    output_tokens: 3000
    ignore_eos: true
    axes: {batch_size: 1..6}
"""
OPTIONS = ("grid.yaml", "--emulate", "1x4:HPU")


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
        self.run = directory / "results" / "gang"
        self.job_id = parse_grid(GRID.encode(), "grid.yaml").jobs()[0].job_id
        self.process = started("run", *OPTIONS, "--no-restart", cwd=directory)

    def workers_that_saved(self, attempt: int, step: int) -> dict[str, int]:
        deadline = time.monotonic() + patience(150)
        found: dict[str, int] = {}
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()[0]
            if len(found) == 2 and min(self.saved(rank) for rank in range(2)) > step:
                return found
            if len(found) < 2:
                logs = tuple(f"hpu-1-HPU{card}-" for card in self.cards_of(attempt))
                pids = worker_pids(self.directory)
                found = {log: pid for log, pid in sorted(pids.items()) if log.startswith(logs)}
            time.sleep(0.02)
        raise AssertionError(f"attempt {attempt} saved nothing in time")

    def cards_of(self, attempt: int) -> list[int]:
        """The cards of an attempt that has begun; none before."""
        with contextlib.suppress(OSError):
            for line in (self.run / "begun.log").read_text().splitlines():
                row = json.loads(line.partition(" ")[2])
                if row["attempt_id"] == f"{self.job_id}-{attempt}":
                    return list(row["card_indices"])
        return []

    def saved(self, rank: int) -> int:
        files = self.directory.glob(f"nightgrid-checkpoints*/*/step-*.rank-{rank}.pt")
        return max((int(file.name[5:13]) for file in files), default=-1)

    def runs_long_jobs(self) -> bool:
        """They need the gang's adapter, so that two jobs run only once it has ended."""
        assert self.process.poll() is None, self.process.communicate()[0]
        now = RunStatus.from_json((self.run / "status.json").read_text())
        return now.running >= 2 and any(card.phase != "queued" for card in now.cards)


def test_a_killed_and_a_stopped_rank_end_their_gang_and_interrupts_end_the_run_in_order(
    tmp_path: Path, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 on one rank: a row within seconds that names the signal and what became of the
    other. A rank that a signal has stopped: noticed by the state of its process, long before any
    time limit. The third attempt goes on where that one was; that it learns what an undisturbed job
    learns is seen where strategies are tested.

    Signals reach the whole process group, SIGTERM as `timeout` sends it: the first keeps the
    cluster alive and what runs, the second stops that too. Every job has a row, and is run again
    the next time."""
    monkeypatch.chdir(tmp_path)
    for variable in ("NIGHTGRID_CHECKPOINTS", "NIGHTGRID_ADAPTERS"):
        monkeypatch.setenv(variable, str(tmp_path))
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
        assert until(run.runs_long_jobs, 200)
        os.killpg(run.process.pid, signal.SIGTERM)
        time.sleep(2)
        assert run.process.poll() is None  # what runs may end
        os.killpg(run.process.pid, signal.SIGINT)
        output, _ = run.process.communicate(timeout=patience(60))
        assert run.process.returncode == 10, output
    finally:
        run.process.kill()
    assert not any(map(alive, second.values()))
    rows = Store.existing(tmp_path / "results", "gang").measurements()
    gang = [row for row in rows if row.experiment == "gang"]
    killed, stopped, succeeded = sorted(gang, key=lambda row: row.attempt_number)

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

    # Some of those that ran may still have waited for a processor.
    states = sorted(row.state for row in rows if row.final and row.experiment == "long")
    lost = states.count(State.LOST)
    assert 1 <= lost <= 4
    assert states == [State.LOST] * lost + [State.NOT_STARTED] * (6 - lost)
    assert worker_pids(tmp_path) == {} and commands_naming(str(tmp_path)) == []
    assert "6 run, 1 reuse, 0 skip" in nightgrid("plan", *OPTIONS).out
