"""A night of faults on servers: each row says what happened, the next job has a server again, and
nothing is left. Two servers behind round-robin run beside them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
import pytest
from command_line import ROOT, started
from patience import commands_naming, patience, until

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.store.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID = """\
name: faults
defaults:
  workload: serving
  model: tiny-chatglm3
  accelerator: CPU
  precision: fp32
  engine: faulty-server
  concurrency: 2
  input_tokens: 6
  output_tokens: 4
  requests: 8
measure: {warmup: 1, min_repeats: 1, max_repeats: 1, time_limit_s: 60, repeat_flagged: 0}
experiments:
  - name: faults
    axes:
      fault:
        - once:dies-after=8
        - once:frozen-after=8
        - once:kills=8
        - empty-after=0
  - name: slow
    fault: slow=600
    start_limit_s: 1
  - name: several servers
    cards: 2
"""

#: Fault -> states of its attempts in order, and words of the last row.
ENDS = {
    "once:dies-after=8": (["FAILED", "SUCCEEDED"], "measured"),
    "once:frozen-after=8": (["FAILED", "SUCCEEDED"], "measured"),
    "once:kills=8": (["FAILED", "SUCCEEDED"], "measured"),
    "empty-after=0": (["FAILED", "TIMED_OUT"], "answers without a token"),
    "slow=600": (["FAILED", "TIMED_OUT"], "not ready after 1 s"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    output: str
    store: Store

    @property
    def rows(self) -> list[Measurement]:
        return self.store.measurements()


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    directory = tmp_path_factory.mktemp("faults")
    information = directory / "faulty-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: faulty\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[nightgrid.engines]\nfaulty-server = faulty_engine:SPEC\n"
    )
    (directory / "grid.yaml").write_text(GRID)
    (directory / "marks").mkdir()
    places = (directory, ROOT / "tests" / "workloads" / "serving", ROOT)
    process = started(
        *("run", "grid.yaml", "--emulate", "1x4:CPU"),
        cwd=directory,
        PYTHONPATH=os.pathsep.join(map(str, places)),
        FAULTY_SERVER_MARKS=str(directory / "marks"),
    )
    output, _ = process.communicate(timeout=patience(240))
    store = Store.existing(directory / "results", "faults")
    return Night(output=output, store=store)


def test_each_fault_of_a_server_has_rows_that_say_what_happened(night: Night) -> None:
    """A server that died or froze is started again for the next attempt."""
    attempts: dict[str, list[Measurement]] = {}
    for row in night.rows:
        if row.experiment != "several servers":
            attempts.setdefault(str(row.parameters["fault"]), []).append(row)
    states = {fault: [str(row.state) for row in rows] for fault, rows in attempts.items()}
    assert states == {fault: ends for fault, (ends, _) in ENDS.items()}, night.output
    for fault, (_, words) in ENDS.items():
        *others, last = attempts[fault]
        assert words in last.reason, (fault, last.reason)
        assert last.final and not any(row.final for row in others)
    died = attempts["once:dies-after=8"][0]
    assert "SIGKILL): a kernel fault of the fake card" in died.reason


def test_a_job_of_two_cards_has_two_servers_that_share_its_requests(night: Night) -> None:
    (row,) = [row for row in night.rows if row.experiment == "several servers"]
    assert row.state is State.SUCCEEDED and row.details["servers"] == "2", row.reason
    (path,) = (night.store.path / "requests").glob(f"{row.attempt_id}*")
    table = pa.ipc.open_file(path).read_all()
    assert Counter(table["server"].to_pylist()) == {0: 4, 1: 4}
    assert table["error"].null_count == len(table)


def test_nothing_of_faulty_servers_is_left(night: Night) -> None:
    assert until(lambda: not commands_naming("faulty_server.py"), 10)
