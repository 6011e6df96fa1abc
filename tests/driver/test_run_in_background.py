"""`nightgrid run … &`: a shell starts it with SIGINT ignored, and SIGTERM still ends it well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import patience, until

from orchestrator.core.job import State
from orchestrator.store.store import Store

ROOT = Path(__file__).resolve().parents[2]

ENTRY = """\
from workloads.settings import WorkloadParameters
from workloads.registry import WorkloadSpec
ENTRY = WorkloadSpec(
    name="waiting", function="waiting:run", parameters=WorkloadParameters, summary="waits"
)
"""
RUN = """\
import time
from pathlib import Path
from workloads.base import Result, Sample
PLACE = Path(__file__).parent

def run(request, context):
    context.enter_phase("load")
    context.enter_phase("measure")
    (PLACE / "running").touch()
    while not (PLACE / "go").exists():
        time.sleep(0.05)
    sample = Sample(repeat=0, batch=0, warmup=False, complete=True, wall_s=1.0, cpu_s=0.0,
                    items=1, input_tokens=1, output_tokens=1, computed_tokens=1)
    return Result(samples=(sample,), stop_reason="max_repeats", load_s=0.0)
"""
GRID = """\
name: night
experiments:
  - name: e
    workload: waiting
    model: tiny-chatglm3
    accelerator: CPU
    precision: fp32
    axes: {batch_size: [1, 2, 4]}
"""


@pytest.mark.slow
@pytest.mark.ray
def test_sigterm_lets_the_running_job_end_and_starts_no_more(tmp_path: Path) -> None:
    """The signal goes to the process group, as `timeout` sends it: Ray has to stay."""
    (tmp_path / "waiting-1.dist-info").mkdir()
    (tmp_path / "waiting-1.dist-info" / "METADATA").write_text("Name: waiting\nVersion: 1\n")
    (tmp_path / "waiting-1.dist-info" / "entry_points.txt").write_text(
        "[nightgrid.workloads]\nwaiting = waiting_entry:ENTRY\n"
    )
    (tmp_path / "waiting_entry.py").write_text(ENTRY)
    (tmp_path / "waiting.py").write_text(RUN)
    (tmp_path / "grid.yaml").write_text(GRID)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "orchestrator", "run", "grid.yaml", "--no-restart"),
            *("--results", "results"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        running = tmp_path / "running"
        assert until(lambda: running.exists() or process.poll() is not None, 60)
        assert running.exists(), process.communicate()[0]
        family = psutil.Process(process.pid).children(recursive=True)
        together = {child.name() for child in family if os.getpgid(child.pid) == process.pid}
        assert not together & {"gcs_server", "raylet"}
        os.killpg(process.pid, signal.SIGTERM)
        status = tmp_path / "results" / "night" / "status.json"
        assert until(lambda: "SIGTERM" in status.read_text(), 30)
        assert process.poll() is None
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=patience(60))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 10, output
    rows = Store.existing(tmp_path / "results", "night").measurements()
    assert sorted(row.state for row in rows) == sorted(
        [State.SUCCEEDED, State.NOT_STARTED, State.NOT_STARTED]
    )
