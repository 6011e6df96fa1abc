"""The executor without processes obeys the protocol, and searches find what fits its cards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_workload
import torch  # noqa: F401 - with the next one: not at the cost of the first test that starts a worker
import transformers  # noqa: F401
from driver_cases import attempt, job, node
from patience import patience
from source_tree import ROOT

from orchestrator.core.events import (
    AttemptEnded,
    Event,
    NodeJoined,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import FailureClass
from orchestrator.core.topology import Card
from orchestrator.driver.local import InProcessExecutor
from orchestrator.store.store import Store
from orchestrator.worker.memory_limit import MemoryLimit

NODE = node(cards=2)
FIRST, SECOND = NODE.cards


def tiny(**parameters: str | int) -> Job:
    return job(1, workload="tiny", parameters=tuple(sorted(parameters.items())))


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessExecutor]:
    tiny_workload.register(monkeypatch)
    opened = InProcessExecutor([NODE])
    yield opened
    opened.close()


def until(executor: InProcessExecutor, count: int, timeout_s: float = 60) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + patience(timeout_s)
    while len(events) < count:
        assert time.monotonic() < deadline, f"only {events}"
        events += executor.events(0.2)
    assert len(events) == count, events
    return events


def ready(executor: InProcessExecutor, card: Card = FIRST) -> None:
    executor.perform(StartWorker(worker_id="w1", card=card))
    joined, event = until(executor, 2)
    assert isinstance(joined, NodeJoined) and isinstance(event, WorkerReady)


def test_a_worker_lives_from_start_over_attempts_to_stop(executor: InProcessExecutor) -> None:
    ready(executor)
    executor.perform(_run())
    (ended,) = until(executor, 1)
    assert isinstance(ended, AttemptEnded) and ended.outcome.state is State.SUCCEEDED
    executor.perform(_run(trouble="missing"))
    executor.perform(StopWorker(worker_id="w1", reason="done"))
    ended, stopped = until(executor, 2)
    assert isinstance(ended, AttemptEnded) and ended.outcome.state is State.FAILED
    assert ended.outcome.failure is not None
    assert ended.outcome.failure.failure_class is FailureClass.DATA_MISSING
    assert isinstance(stopped, WorkerStopped) and stopped.failure is None
    executor.perform(StartWorker(worker_id="w2", card=FIRST))
    assert isinstance(until(executor, 1)[0], WorkerReady)


def test_a_job_begins_when_the_driver_has_nothing_left_to_write(
    executor: InProcessExecutor,
) -> None:
    """It may take the process with it, and the driver only looks while rows wait."""
    ready(executor)
    executor.perform(_run())
    for _ in range(10):
        assert executor.events(0.0) == [] and not executor.progress()
        time.sleep(0.02)
    assert isinstance(until(executor, 1)[0], AttemptEnded)


def test_a_worker_that_cannot_start_is_stopped_with_its_failure() -> None:
    real = node(cards=1, emulated=False)
    executor = InProcessExecutor([real])
    executor.perform(StartWorker(worker_id="w1", card=real.cards[0]))
    _, stopped = until(executor, 2)
    assert isinstance(stopped, WorkerStopped) and stopped.failure is not None
    assert stopped.failure.failure_class is FailureClass.ACQUIRE
    executor.perform(StartWorker(worker_id="w2", card=real.cards[0]))
    assert isinstance(until(executor, 1)[0], WorkerStopped)
    executor.close()


def test_modules_are_imported_before_the_memory_of_a_card_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the imports of the first job count as its own, and nothing fits."""
    (tmp_path / "preloaded_here.py").write_text("")
    (tmp_path / "broken_here.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    there: list[bool] = []

    def above_baseline(memory_bytes: int) -> None:
        there.append("preloaded_here" in sys.modules)

    monkeypatch.setattr(MemoryLimit, "above_baseline", above_baseline)
    limited = replace(NODE, memory_bytes_per_card=10**8)
    names = ("broken_here", "absent_here?", "preloaded_here")
    executor = InProcessExecutor([limited], preload=names)
    ready(executor, card=limited.cards[0])
    executor.close()
    assert there == [True]


def test_a_busy_worker_reports_progress(executor: InProcessExecutor) -> None:
    ready(executor)
    executor.perform(_run(size=3000))
    phases = set()
    events: list[Event] = []
    while not events:
        phases |= {heard.phase for heard in executor.progress().values()}
        events = executor.events(0.001)
    assert phases & {"load", "measure"}
    assert executor.progress() == {}


def _run(**parameters: str | int) -> RunAttempt:
    return RunAttempt(attempt=attempt(tiny(**parameters), FIRST), worker_ids=("w1",))


def test_closing_drops_what_is_queued(executor: InProcessExecutor) -> None:
    ready(executor)
    executor.perform(_run())
    executor.perform(StartWorker(worker_id="w2", card=SECOND))
    executor.close()
    assert not any(isinstance(event, WorkerReady) for event in executor.events(0.1))


# ---------------------------------------------------------------- searches for batch sizes


@pytest.mark.slow
def test_the_largest_batch_that_fits_a_card_of_86_mib_is_found(tmp_path: Path) -> None:
    """What did not fit was refused by the kernel and ended as OUT_OF_MEMORY."""
    single = {"repeat_flagged": 0, "warmup": 0, "min_repeats": 1, "max_repeats": 1}
    kind = {"workload": "text-generation", "model": "tiny-chatglm3", "accelerator": "HPU"}
    lengths = {"input_tokens": 256, "output_tokens": 2, "ignore_eos": True, "prompts": 1}
    search = {"batch_size": {"max": {"cap": 24, "tolerance": 0.5}}, "precision": "fp32"}
    grid = {
        "name": "night",
        "measure": {**single, "time_limit_s": 5},
        "experiments": [{"name": "max", **kind, **lengths, **search}],
    }
    (tmp_path / "grid.yaml").write_text(json.dumps(grid))
    options = ("--in-process", "--card-memory", "0.084", "--results", ".")
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "run", "grid.yaml", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = Store.existing(tmp_path, "night").measurements()
    (final,) = [row for row in rows if row.final]
    tried = [row for row in rows if not row.final]
    assert final.state is State.SUCCEEDED
    fits, refused = (
        [row.batch_size or 0 for row in tried if row.state is state]
        for state in (State.SUCCEEDED, State.OUT_OF_MEMORY)
    )
    assert len(fits) + len(refused) == len(tried)
    assert max(fits) == final.batch_size < min(refused) <= 1.5 * max(fits) + 1
    told = re.search(r"batch size (\d+) fits and (\d+) does not.*\((\d+) probes\)", final.reason)
    assert told is not None, final.reason
    assert [int(number) for number in told.groups()] == [max(fits), min(refused), len(tried)]
