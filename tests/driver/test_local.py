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
from orchestrator.core.measurement import Measurement
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


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> list[Measurement]:
    """Rows of two searches on a card of 86 MiB."""
    home = tmp_path_factory.mktemp("searches")
    sizes = {goal: {goal: {"cap": 24, "tolerance": 0.25}} for goal in ("max", "best")}
    defaults = {"workload": "text-generation", "model": "tiny-chatglm3", "accelerator": "HPU"}
    lengths = {"input_tokens": 256, "output_tokens": 2, "ignore_eos": True, "prompts": 1}
    grid = {
        "name": "night",
        "defaults": {**defaults, **lengths, "precision": "fp32"},
        "measure": {
            "repeat_flagged": 0,
            "warmup": 0,
            "min_repeats": 1,
            "max_repeats": 1,
            "time_limit_s": 5,
        },
        "experiments": [{"name": goal, "batch_size": size} for goal, size in sizes.items()],
    }
    (home / "grid.yaml").write_text(json.dumps(grid))
    options = ("--in-process", "--card-memory", "0.084", "--results", ".")
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "run", "grid.yaml", *options],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Store.existing(home, "night").measurements()


def of(rows: list[Measurement], goal: str) -> tuple[Measurement, list[Measurement]]:
    mine = [row for row in rows if row.batch_size_requested.startswith(goal)]
    (final,) = [row for row in mine if row.final]
    assert final.state is State.SUCCEEDED
    assert {row.state for row in mine} <= {State.SUCCEEDED, State.OUT_OF_MEMORY}
    return final, [row for row in mine if not row.final]


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found(searched: list[Measurement]) -> None:
    """What did not fit was refused by the kernel and ended as OUT_OF_MEMORY."""
    final, tried = of(searched, "max")
    fits, refused = (
        [row.batch_size or 0 for row in tried if row.state is state]
        for state in (State.SUCCEEDED, State.OUT_OF_MEMORY)
    )
    assert max(fits) == final.batch_size < min(refused) <= 1.25 * max(fits) + 1
    told = re.search(r"batch size (\d+) fits and (\d+) does not.*\((\d+) probes\)", final.reason)
    assert told is not None, final.reason
    assert [int(number) for number in told.groups()] == [max(fits), min(refused), len(tried)]


@pytest.mark.slow
def test_the_fastest_batch_is_one_that_fits(searched: list[Measurement]) -> None:
    final, tried = of(searched, "best")
    fits = {row.batch_size for row in tried if row.state is State.SUCCEEDED}
    assert final.batch_size in fits and len(fits) >= 2
    assert f"batch size {final.batch_size} is the fastest of" in final.reason
