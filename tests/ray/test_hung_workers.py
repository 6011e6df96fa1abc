"""Workers that hang, on real Ray: whatever they have started is gone before their card is."""

from __future__ import annotations

import time

import psutil
import pytest
from patience import patience
from ray_bench import Bench

from orchestrator.core.events import StartWorker, StopWorker, WorkerStopped
from orchestrator.core.job import State

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_worker_that_ignores_signals_is_gone_with_all_its_children_before_its_card_is_free(
    bench: Bench,
) -> None:
    """Children in its own process group and in sessions of their own; the card is used again."""
    card = bench.node("hpu-1").cards[0]
    [worker] = bench.start(card)
    attempt_id = bench.run((card,), [worker], "stubborn")
    process = psutil.Process(worker.info.pid)
    deadline = time.monotonic() + patience(30)
    while len(children := process.children(recursive=True)) < 2:
        assert time.monotonic() < deadline, children
        bench.seen += bench.executor.events(0.1)
    bench.executor.perform(StopWorker(worker_id=worker.worker_id, reason="no progress for 900 s"))
    bench.stopped(worker.worker_id)
    assert not [each for each in (process, *children) if _lives(each)]
    outcome = bench.ended(attempt_id).outcome
    assert outcome.state is State.LOST and outcome.failure is not None
    assert "no progress for 900 s" in outcome.failure.message
    again = bench.start(card)
    assert bench.ended(bench.run((card,), again, "sleep:0")).outcome.state is State.SUCCEEDED
    bench.stop(*again)


def test_a_worker_that_never_comes_up_can_be_stopped(bench: Bench) -> None:
    """It hangs before it has said a word; its card is used by the next."""
    card = bench.node("hpu-1").cards[1]
    bench.executor.perform(StartWorker(worker_id="stuck-1", card=card))
    bench.seen += bench.executor.events(3.0)
    assert not [e for e in bench.seen if getattr(e, "worker_id", "") == "stuck-1"]
    bench.executor.perform(StopWorker(worker_id="stuck-1", reason="did not come up"))
    stopped = bench.stopped("stuck-1")
    assert isinstance(stopped, WorkerStopped) and stopped.failure is None
    bench.stop(*bench.start(card))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
