"""Ray's control store is frozen or gone: what runs on the nodes goes on, and somebody says so."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from patience import patience
from ray_bench import Bench

from orchestrator.core.events import NodeLeft
from orchestrator.core.job import State
from orchestrator.on_ray import gcs

pytestmark = pytest.mark.ray

#: Should the driver wait for the store: it answers again after so long, or later under load, but
#: before Ray ends its nodes for want of it (60 s).
MOST_S, NODES_LIVE_S = 20.0, 45.0


@pytest.fixture
def frozen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The control store of the bench's cluster, stopped; set once it goes on. A second without an
    answer is silence."""
    monkeypatch.setattr(gcs, "SILENT_AFTER_S", 1.0)
    bench.node("cpu-1")
    directory = str(bench.cluster.directory)
    (server,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() == "gcs_server" and directory in " ".join(process.cmdline())
    ]
    goes_on = threading.Event()

    def thaw() -> None:
        os.kill(server.pid, signal.SIGCONT)
        goes_on.set()

    timer = threading.Timer(min(patience(MOST_S), NODES_LIVE_S), thaw)
    os.kill(server.pid, signal.SIGSTOP)
    timer.start()
    yield goes_on
    timer.cancel()
    thaw()
    deadline = time.monotonic() + patience(60)
    while bench.executor.trouble:
        assert time.monotonic() < deadline
        bench.seen += bench.executor.events(0.2)


def test_a_frozen_control_store_stops_no_work(bench: Bench, frozen: threading.Event) -> None:
    card = bench.node("cpu-1").cards[0]
    before = len(bench.seen)
    while not bench.executor.trouble:
        bench.seen += bench.executor.events(0.5)
        assert not frozen.is_set(), "the loop waited until the control store answered"
    (worker,) = bench.start(card)
    ended = bench.ended(bench.run((card,), [worker], "ok"))
    bench.stop(worker)
    assert not frozen.is_set(), "the loop waited until the control store answered"
    assert ended.outcome.state is State.SUCCEEDED
    assert not [event for event in bench.seen[before:] if isinstance(event, NodeLeft)]
