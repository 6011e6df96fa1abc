"""What a driver does otherwise when the one before it died: in this process, without Ray."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_workload
from driver_cases import node

from orchestrator import running
from orchestrator.cli import main
from orchestrator.cluster import Node
from orchestrator.errors import ClusterError
from orchestrator.job import Accelerator
from orchestrator.measurement import Measurement
from orchestrator.results.store import Store
from orchestrator.running import RunOptions, run_grid
from orchestrator.session import Session, in_process_session
from orchestrator.supervised import Charge

GRID = """\
name: night
defaults:
  workload: tiny
  model: tiny-chatglm3
  dataset: advertisegen-synthetic
  accelerator: HPU
  precision: fp32
  batch_size: 1
measure: {warmup: 0, min_repeats: 2, max_repeats: 2, time_limit_s: 5}
experiments:
  - name: sizes
    axes: {trouble: ["", missing]}
"""


@pytest.fixture
def pipe() -> Iterator[int]:
    """Where facts are told; nobody reads them."""
    reading, writing = os.pipe()
    yield writing
    os.close(writing)
    os.close(reading)


def measured(options: RunOptions, tmp_path: Path) -> list[Measurement]:
    """The rows of a run after one more driver."""
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID)
    run_grid(grid, dataclasses.replace(options, results=tmp_path, in_process=True, quiet=True))
    return Store.existing(tmp_path, "night").measurements()


@pytest.mark.parametrize("asked", ["force", "retry_failed"])
def test_what_was_measured_anew_is_not_measured_anew_once_more(
    asked: str, tmp_path: Path, pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--force and --retry-failed are meant once, however many drivers it takes."""
    tiny_workload.register(monkeypatch)
    options = RunOptions(retry_failed=asked == "retry_failed", force=asked == "force")
    before = measured(RunOptions(), tmp_path)
    began = time.time()
    charge = Charge(supervisor=os.getppid(), pipe=pipe, began=began)
    first = measured(dataclasses.replace(options, charge=charge), tmp_path)
    assert len(first) > len(before)  # as it was asked to
    second = dataclasses.replace(charge, life=2)
    again = dataclasses.replace(options, charge=second, resume=True)
    assert measured(again, tmp_path) == first
    # One that died before it had come so far leaves it to the next.
    later = dataclasses.replace(second, began=time.time())
    assert len(measured(dataclasses.replace(again, charge=later), tmp_path)) > len(first)


def waiting(
    looks: list[list[Node]], cards: dict[str, int], pipe: int, said: list[str], life: int = 2
) -> Session:
    """The session that a driver has in the end, of a cluster on which it sees these nodes one
    time after the other."""
    with in_process_session([Accelerator.HPU]) as session:
        session = dataclasses.replace(
            session,
            nodes=tuple(looks[0]),
            look=lambda: tuple(looks.pop(0) if len(looks) > 1 else looks[0]),
        )
        charge = Charge(supervisor=1, pipe=pipe, began=0.0, life=life, cards=cards)
        return running._with_its_nodes(RunOptions(charge=charge), session, said.append)


def test_nodes_that_were_there_are_waited_for(monkeypatch: pytest.MonkeyPatch, pipe: int) -> None:
    """A plan for those that happen to be back first would give up jobs of the others for good."""
    monkeypatch.setattr(running.time, "sleep", lambda _: None)
    one, two = node("hpu-1"), node("hpu-2")
    said: list[str] = []
    session = waiting([[], [one], [one, two]], {"HPU": 4}, pipe, said)
    assert [each.name for each in session.nodes] == ["hpu-1", "hpu-2"]
    assert said == ["waiting for the cluster's nodes: 4 HPU cards are not back yet"]
    assert waiting([[one]], {"HPU": 4}, pipe, said, life=1).nodes == (one,)  # nothing died


def test_nodes_that_stay_away_are_done_without(monkeypatch: pytest.MonkeyPatch, pipe: int) -> None:
    """After a while; but not without a whole kind of card, whose jobs would be UNSUPPORTED."""
    monkeypatch.setattr(running.time, "sleep", lambda _: None)
    monkeypatch.setattr(running, "_NODES_PATIENCE_S", 0.05)
    said: list[str] = []
    session = waiting([[node("hpu-1")]], {"HPU": 4}, pipe, said)
    assert len(session.nodes) == 1 and "going on without 2 HPU cards" in said[-1]
    with pytest.raises(ClusterError, match="no node with GPU has come back"):
        waiting([[node("hpu-1")]], {"HPU": 2, "GPU": 2}, pipe, said)


def test_code_that_calls_main_gets_no_child(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a process that is the command itself is watched over by itself."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.replace("workload: tiny", "workload: text-generation"))
    assert main(["run", str(grid), "--address", "127.0.0.1:1"]) in (2, 3)
    assert "nightgrid run: " in capsys.readouterr().err
