"""Nights with a card that fails every job that it gets, and with a card that is lost."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command_line import started
from outside_device import offer
from patience import patience

from orchestrator.core.job import State
from orchestrator.store.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.slow]

#: A worker's log has the name of its card.
WORKLOAD = """
import os, time
from workloads.base import Result, Sample
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters, setting

class Parameters(WorkloadParameters):
    number: int = setting(0, role="work", description="Tells jobs apart.")

SPEC = WorkloadSpec(name="sick", function="sick_card:run", parameters=Parameters, summary="-")

def run(request, context):
    time.sleep(0.3)
    if "HPU1" in os.readlink("/proc/self/fd/2"):
        raise RuntimeError("CUDA_VERSION of this card is odd")  # an error of no known class
    sample = dict(batch=0, warmup=False, complete=True, wall_s=0.1, cpu_s=0.0, items=1)
    tokens = dict(input_tokens=1, output_tokens=0, computed_tokens=1)
    samples = tuple(Sample(repeat=repeat, **sample, **tokens) for repeat in range(3))
    return Result(samples=samples, stop_reason="max_repeats")
"""
GRID = """
name: sick
experiments:
  - {name: e, workload: sick, model: tiny-chatglm3, accelerator: HPU, axes: {number: NUMBERS}}
"""


def output_of(command: subprocess.Popen[str]) -> str:
    output, _ = command.communicate(timeout=patience(180))
    assert command.returncode == 0, output
    return output


def test_a_card_that_fails_every_job_is_named_and_the_night_succeeds(tmp_path: Path) -> None:
    (tmp_path / "sick_card.py").write_text(WORKLOAD)
    offer(tmp_path, {"sick": "sick_card:SPEC"}, "nightgrid.workloads")
    (tmp_path / "grid.yaml").write_text(GRID.replace("NUMBERS", str(list(range(8)))))
    words = ("run", "grid.yaml", "--emulate", "1x2:HPU", "--no-restart")
    output = output_of(started(*words, cwd=tmp_path))
    rows = Store.existing(tmp_path / "results", "sick").measurements()
    failed = [row for row in rows if row.state is State.FAILED]
    assert failed and all(row.card_indices == (1,) for row in failed)
    assert len(failed) == 3, (
        "the card is quarantined, whether its jobs have worked elsewhere or not"
    )
    worked = {row.job_id: row.reason for row in rows if row.state is State.SUCCEEDED}
    assert len(worked) == 8
    assert {worked[row.job_id] for row in failed} == {"measured; it failed on hpu-1/HPU1"}
    assert "Cards on which jobs failed that worked elsewhere" in output


#: Two cards that compute on the CPU, are counted by Ray as GPUs and have a tool that lists them.
DEVICE = """
import dataclasses
from workloads.devices import cpu
from workloads.devices.monitor.host import CardTelemetry

class Board(cpu.CpuDevice):
    @staticmethod
    def telemetry():
        lost = {0: "it has fallen off the bus"}
        return {n: CardTelemetry(memory_used_bytes=0, lost=lost.get(n, "")) for n in range(2)}

    @staticmethod
    def uuids():
        return {1: "GPU-0a1"}

SPEC = Board.spec = dataclasses.replace(
    cpu.SPEC, name="board", accelerator="BOARD", title="a board", host=False, also_called=(),
    handle="board:Board", torch_type="cpu", ray_resource="GPU", ray_option="num_gpus",
    ray_type="Board", ray_indices=True, visible_variable="CUDA_VISIBLE_DEVICES", server_cards=2,
    variables=lambda process: {}, capabilities=frozenset({"native_eager"}),
)
"""
LOOK = """
STARTED = open("/proc/self/environ").read().split(chr(0))
LOOK = {
    "started with": "".join(one for one in STARTED if one.startswith("CUDA_VISIBLE_DEVICES=")),
    "has now": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
}
"""
LOST = "BOARD0 is left out: it has fallen off the bus"


def test_a_run_goes_on_without_a_lost_card_and_names_it(tmp_path: Path) -> None:
    """Behind a lost card CUDA may count anew: the others are shown by UUID while they are taken."""
    (tmp_path / "board.py").write_text(DEVICE)
    looks = WORKLOAD.replace('stop_reason="max_repeats"', 'stop_reason="max_repeats", details=LOOK')
    (tmp_path / "sick_card.py").write_text(looks + LOOK)
    offer(tmp_path, {"sick": "sick_card:SPEC"}, "nightgrid.workloads")
    with (tmp_path / "outside-1.dist-info" / "entry_points.txt").open("a") as points:
        points.write("[nightgrid.devices]\nboard = board:SPEC\n")
    grid = GRID.replace("NUMBERS", "[0, 1]").replace("HPU", "BOARD")
    (tmp_path / "grid.yaml").write_text(grid)
    output = output_of(started("run", "grid.yaml", "--no-restart", cwd=tmp_path))
    columns = ["state", "card_indices", "details"]
    rows = pq.read_table(tmp_path / "results" / "sick" / "rows", columns=columns).to_pylist()
    assert {row["state"] for row in rows} == {"SUCCEEDED"} and len(rows) == 2
    assert {index for row in rows for index in row["card_indices"]} == {1}
    for row in rows:
        details = dict(row["details"])
        assert details["started with"] == "CUDA_VISIBLE_DEVICES=GPU-0a1"
        assert details["has now"] == "1"
    assert f"note: {socket.gethostname()}: {LOST}" in output
    assert "! Lost cards in 2 of 2 rows" in output
