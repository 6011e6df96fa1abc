"""`nightgrid run --emulate` as a user types it: real Ray nodes, real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import Nightgrid, started
from patience import commands_naming, patience, until
from refusing_proxy import refusing_proxy

from orchestrator.analysis.replicates import join
from orchestrator.analysis.selection import settings_of
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.store.store import Store
from orchestrator.worker.orphans import (
    Owner,
    abandoned_private_directories,
    orphans_of,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID = """\
name: mixed
defaults:
  model: tiny-chatglm3
  dataset: advertisegen-synthetic
  workload: text-generation
  accelerator: HPU
  precision: fp32
  prompts: 4
  output_tokens: 24
  ignore_eos: true
measure: {warmup: 1, min_repeats: 2, max_repeats: 2, time_limit_s: 5}
experiments:
  - name: gangs
    axes: {cards: [1, 2]}
  - name: shorter
    output_tokens: 16
    axes: {batch_size: [1, 2]}
  - name: twice
    batch_size: 2
    replicates: 2
"""
OPTIONS = ("grid.yaml", "--emulate", "1x5:HPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """A run whose driver was killed with ``kill -9``, whose second driver lost its cluster's
    control store, and that came to its end by itself."""

    directory: Path
    interrupted: set[str]  # the attempts that were running when the driver was killed
    output: str
    process: subprocess.Popen[str]
    notices: list[dict[str, Any]]
    proxied: list[str]  # requests that came to the proxy of its environment

    @property
    def store(self) -> Store:
        return Store.existing(self.directory / "results", "mixed")

    @property
    def rows(self) -> list[Measurement]:
        return self.store.measurements()


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    with refusing_proxy() as proxy:
        whole = whole_night(tmp_path_factory.mktemp("mixed"), proxy.variables)
    return replace(whole, proxied=proxy.requests)


def whole_night(directory: Path, variables: dict[str, str]) -> Night:
    """Jobs of one card and of two, a driver that dies at work, and one whose control store dies
    while it works."""
    (directory / "grid.yaml").write_text(GRID)
    keep = 'sh -c "cat >> notices; echo >> notices"'
    # Jobs that have begun take turns on the cores. Ray ends nodes a minute after their control
    # store, which on a busy machine is before the last job's turn.
    variables = variables | {"RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
    process = started("run", *OPTIONS, "--notify", keep, cwd=directory, **variables)
    place = directory / "results" / "mixed"
    first = at_work(process, place, attempts=2)
    for child in psutil.Process(first).children(recursive=True):
        if "orchestrator.worker.orphans" in child.cmdline():
            child.kill()  # else it would have cleared up before the next driver
    os.kill(first, signal.SIGKILL)
    noted = (place / "begun.log").read_bytes()  # the next driver starts two seconds later
    at_work(process, place, attempts=6, noted=noted)  # the last one
    (store,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.name() == "gcs_server" and child.status() != psutil.STATUS_ZOMBIE
    ]
    store.kill()
    output, _ = process.communicate(timeout=patience(240))
    assert process.returncode == 0, output
    return Night(
        directory=directory,
        interrupted=set(re.findall(r"attempt (\S+) was running then: LOST", output)),
        output=output,
        process=process,
        notices=[json.loads(line) for line in (directory / "notices").read_text().splitlines()],
        proxied=[],
    )


def at_work(
    process: subprocess.Popen[str], place: Path, *, attempts: int, noted: bytes = b""
) -> int:
    before, begun = set(noted.splitlines()), set[bytes]()  # a line goes when its attempt ends

    def enough() -> bool:
        assert process.poll() is None
        with contextlib.suppress(OSError):
            begun.update(set((place / "begun.log").read_bytes().splitlines()) - before)
        return len(begun) >= attempts

    assert until(enough, 120)
    return int(json.loads((place / "driver.lock").read_text())["pid"])


def test_a_run_goes_on_by_itself_after_its_driver_was_killed(night: Night) -> None:
    assert "the driver was killed by SIGKILL" in night.output
    assert "taken over from a driver that died: process" in night.output
    lost = [row for row in night.rows if row.state is State.LOST]
    assert len(night.interrupted) >= 2
    reasons = [f"{row.attempt_id}: {row.reason}" for row in lost]
    assert {row.attempt_id for row in lost} == night.interrupted, [*reasons, night.output]
    assert not any(row.final for row in lost)
    assert all("died while it ran" in row.reason for row in lost)
    others = [row for row in night.rows if row.state is not State.LOST]
    assert [(row.state, row.final) for row in others] == [(State.SUCCEEDED, True)] * 6
    assert len({row.job_id for row in others}) == 6
    assert len({row.attempt_id for row in night.rows}) == len(night.rows)
    assert len({row.invocation_id for row in night.rows}) == 2
    assert not (night.store.path / "begun.log").exists()
    assert [notice["state"] for notice in night.notices] == ["interrupted", "finished"]
    assert night.notices[0]["exit_code"] == 137 and night.notices[1]["exit_code"] == 0


def test_a_night_behind_a_proxy_asks_it_for_nothing_of_its_own(night: Night) -> None:
    """Only Ray asks whether it runs in a cloud; its report of usage is never sent."""
    others = [url for url in night.proxied if "/metadata" not in url and "/meta-data" not in url]
    assert [url for url in others if "computeMetadata" not in url] == []


def test_a_run_goes_on_without_a_control_store(night: Night) -> None:
    told = [line for line in night.output.splitlines() if "what runs goes on" in line]
    assert len(told) <= 1 and all("control store has not answered" in line for line in told)
    assert commands_naming(str(night.directory)) == []
    assert not list(Path("/tmp").glob(f"ng-{night.process.pid}-*"))


def test_jobs_and_a_gang_run_on_an_emulated_node(night: Night) -> None:
    assert "\x1b" not in night.output  # a log, not a terminal
    rows = [row for row in night.rows if row.final]
    (gang,) = [row for row in rows if row.cards == 2]
    assert gang.card_indices in ((0, 1), (2, 3)) and {rank for rank, _ in gang.samples} == {0, 1}
    assert {row.nodes for row in rows} == {("hpu-1",)}
    assert {row.niceness for row in rows} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert all(row.emulated and row.worker_pid for row in rows)
    servers = (night.store.path / "logs").glob("spawner-*.log")
    assert len([*servers]) == len({row.invocation_id for row in night.rows})


def test_replicates_run_in_processes_of_their_own(night: Night) -> None:
    rows = [row for row in night.rows if row.final and row.experiment == "twice"]
    assert sorted(row.replicate for row in rows) == [1, 2]
    assert len({row.worker_pid for row in rows}) == len({row.card_indices for row in rows}) == 2
    (cell,) = join(rows, settings_of(rows), {}).cells
    assert cell.row.metrics.processes == 2 and cell.row.metrics.throughput_low is not None


def test_a_run_that_has_everything_starts_nothing(
    night: Night, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = night.rows
    monkeypatch.chdir(night.directory)
    again = nightgrid("run", *OPTIONS).all
    assert "0 run, 6 reuse" in again and "starting" not in again
    assert night.rows == before


def test_nothing_that_dead_drivers_started_lives_on(night: Night) -> None:
    """Ray's agents, which hold nothing, follow a control store that was killed within a minute:
    this test is the last one, so that the others pass meanwhile."""
    run_id = (night.store.path / "run.id").read_text().split()[0]
    deadline = time.monotonic() + patience(120)
    while (left := orphans_of(Owner(run_id=run_id, invocation_id="the test's"))) and (
        time.monotonic() < deadline
    ):
        commands = [Path(f"/proc/{each.pid}/cmdline") for each in left]
        assert all(b"Agent" in one.read_bytes() for one in commands if one.exists()), left
        time.sleep(0.5)
    assert left == []
    assert not [each for each in abandoned_private_directories() if each.owner.startswith(run_id)]
