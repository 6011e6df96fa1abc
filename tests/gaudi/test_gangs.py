"""Gangs over hccl as it is: ranks wait for a dead one for ever, so it is found from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from patience import patience, until
from test_node_workers import Node
from test_process import ATTEMPT, Server, close_server, open_server

from orchestrator.core.outcome import WorkerInfo
from orchestrator.worker.protocol import (
    Ended,
    Halted,
    Listen,
    Listened,
    Run,
    Start,
    Started,
    Stop,
)
from workloads.devices import environment_for

from hccl_worker import LIMIT_S  # isort: skip

CARDS = (2, 3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    opened = open_server(tmp_path)
    yield opened
    close_server(opened)


def start(server: Server, rank: int) -> Start:
    environment = environment_for("hpu", CARDS[rank], threads=1, cards=2, gang=CARDS)
    return replace(
        server.request(f"rank-{rank}", log=str(rank)),
        factory="hccl_worker:HcclWorker",
        environments={"": environment},
    )


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_is_gone_is_noticed_from_outside_alone(
    server: Server, how: signal.Signals
) -> None:
    """A killed rank is told as ended, a stopped one as halted, within 30 s. The other rank, whose
    waits have a time limit of two seconds that hccl ignores, tells nothing."""
    node = Node(server)
    node.do(start(server, 0), start(server, 1))
    for rank in range(2):
        node.wait_for(Started, f"rank-{rank}")
    node.do(Listen("rank-0", "a-1", "127.0.0.1"))
    met = node.wait_for(Listened, "rank-0")
    assert isinstance(met, Listened)
    for rank in range(2):
        node.do(Run(f"rank-{rank}", ATTEMPT, rank, met.rendezvous))

    def exchanging() -> bool:
        assert not [each for each in node.responses if isinstance(each, Ended)], node.responses
        heard = node.workers.progress().values()
        return [each.phase for each in heard] == ["measure"] * 2

    assert until(exchanging, 60), (server.logs / "0.log").read_text()[-2000:]
    (started,) = [r for r in node.responses if isinstance(r, Started) and r.worker_id == "rank-1"]
    assert isinstance(started.value, WorkerInfo)
    os.kill(started.value.pid, how)
    began = time.monotonic()
    told = Halted if how is signal.SIGSTOP else Ended
    while not [r for r in node.responses if isinstance(r, told) and r.worker_id == "rank-1"]:
        node.workers.look()
        time.sleep(1.0)  # as the agent does
        assert time.monotonic() - began < patience(30)
    time.sleep(max(0.0, began + 2 * LIMIT_S - time.monotonic()))
    assert "Ended" not in node.kinds("rank-0")
    for rank in range(2):
        node.do(Stop(f"rank-{rank}", "done"))
    assert until(lambda: all("Stopped" in node.kinds(f"rank-{rank}") for rank in range(2)), 10)
