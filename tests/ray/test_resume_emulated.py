"""kill -9 of a driver in the middle of a run on real Ray nodes, then `nightgrid run --resume`."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from test_run_emulated import HEAD, Run

from orchestrator.job import State
from orchestrator.results.store import Store
from orchestrator.worker.leftovers import Owner, leftovers

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID = (
    HEAD
    + """\
  - name: resumed
    accelerator: HPU
    output_tokens: 400
    ignore_eos: true
    axes:
      batch_size: [1, 2]
"""
)


def test_a_run_goes_on_at_once_after_its_driver_was_killed(tmp_path: Path) -> None:
    """The attempts of the dead driver are LOST, once; every job is measured; nothing that the dead
    driver had started lives on."""
    (tmp_path / "grid.yaml").write_text(GRID.replace("name: mixed", "name: night"))
    first = Run(tmp_path, "--emulate", "1x2")
    log = tmp_path / "results" / "night" / "begun.log"
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_bytes().splitlines()) < 2:
        assert time.monotonic() < deadline and first.process.poll() is None
        time.sleep(0.05)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert first.process.stdout is not None
    first.process.stdout.close()

    again = Run(tmp_path, "--resume")
    assert again.finish() == 0, again.output
    assert "taken over from a driver that died: process" in again.output
    store = Store.existing(tmp_path / "results", "night")
    rows = store.measurements()
    assert Counter((row.state, row.final) for row in rows) == {
        (State.LOST, False): 2,
        (State.SUCCEEDED, True): 2,
    }
    assert len({row.attempt_id for row in rows}) == 4
    assert len({row.invocation_id for row in rows}) == 2
    assert all("died while it ran" in row.reason for row in rows if row.state is State.LOST)
    run_id = (store.path / "run.id").read_text().strip()
    assert leftovers(Owner(run_id=run_id, invocation_id="the test's")) == []
    assert not log.exists()
