"""The disks under all logs are full, the driver's and the workers', and every job prints much:
the run measures everything, ends with exit code 0, and says afterwards what its log misses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from orchestrator.core.job import State
from orchestrator.store.store import Store
from orchestrator.worker import cpu_slots

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from patience import patience  # noqa: E402
from small_disks import fill, small_disk  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID = """\
name: printing
defaults: {workload: chaos, model: tiny-chatglm3, accelerator: HPU, precision: fp32, batch_size: 1}
measure: {warmup: 0, min_repeats: 1, max_repeats: 1, time_limit_s: 600}
experiments:
  - name: jobs
    seconds: 1.0
    axes: {number: [1, 2, 3, 4]}
"""


def number_of_rows(directory: Path) -> int:
    return sum(pq.read_metadata(path).num_rows for path in directory.glob("*.parquet"))


def test_a_run_whose_logs_have_no_room_measures_everything(tmp_path: Path) -> None:
    """The workers' disk has 16 KiB, less than what one job prints; the driver's is full from its
    first job on, until its last row."""
    (tmp_path / "grid.yaml").write_text(GRID)
    logs = tmp_path / "results/printing/logs"
    logs.parent.mkdir(parents=True)
    paths = [ROOT, ROOT / "tests/chaos", ROOT / "tests/ray"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "NIGHTGRID_"))}
    environment |= {k: v for k, v in os.environ.items() if k == cpu_slots.VARIABLE}
    with small_disk(logs, 1 << 14), small_disk(tmp_path / "small", 1 << 16) as disk:
        rows = logs.parent / "rows"
        ballast = fill(disk)
        with (disk / "night.log").open("a") as log:
            driver = subprocess.Popen(
                [
                    sys.executable,
                    str(ROOT / "tests/chaos/chaos_run.py"),
                    "run",
                    "grid.yaml",
                    "--emulate",
                    "1x2:HPU",
                ],
                cwd=tmp_path,
                env=environment | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
                stdout=log,
                stderr=log,
            )
        gone = threading.Event()
        threading.Thread(target=lambda: (driver.wait(), gone.set()), daemon=True).start()
        while not gone.wait(0.05) and number_of_rows(rows) < 4:
            pass
        ballast.unlink()  # before the tables
        assert gone.wait(patience(120))
        said = (disk / "night.log").read_text()
        worker_logs = {path.name: path.stat().st_size for path in logs.iterdir()}
    assert driver.returncode == 0, said
    done = Store.existing(tmp_path / "results", "printing").measurements()
    assert [(row.state, row.final) for row in done] == [(State.SUCCEEDED, True)] * 4
    assert (tmp_path / "results/printing/report.html").is_file()
    assert "bytes of output lost from" in said and "No space left on device" in said
    assert sum(worker_logs.values()) >= 1 << 13, worker_logs  # it was they who filled their disk
