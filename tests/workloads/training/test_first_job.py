"""A cost that every shape has once a process, planted under products, is paid in warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from finetuning_cases import losses, train
from generation_cases import PROMPTS, Worker, write_dataset

from workloads.base import MeasureSettings, Result
from workloads.engines.graph import layers
from workloads.training.loop import Steps

pytestmark = pytest.mark.slow  # trains in processes of their own

COST_S = 0.02
SETTINGS = MeasureSettings(warmup=1, min_repeats=2, max_repeats=2, time_limit_s=600)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven prompts of as many lengths: in batches of three the last is a partial one."""
    return write_dataset(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", PROMPTS[:7])


class Planted:
    """Each first product of so many rows takes 20 ms more; ``paid`` says in which phase."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.known: set[tuple[int, ...]] = set()
        self.paid: list[str] = []

    def meet(self, given: torch.Tensor) -> None:
        shape = tuple(given.shape[:-1])
        if shape not in self.known:
            self.known.add(shape)
            self.paid.append(self.worker.phases[-1])
            time.sleep(COST_S)

    def during(self, job: Callable[[], Result]) -> tuple[Result, dict[str, int]]:
        self.paid.clear()
        result = job()
        return result, {phase: self.paid.count(phase) for phase in self.paid}


@pytest.fixture
def planted(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Planted:
    found, forward, linear = Planted(worker), torch.nn.Linear.forward, layers.linear

    def module(self: torch.nn.Linear, given: torch.Tensor) -> torch.Tensor:
        found.meet(given)
        return forward(self, given)

    def function(given: torch.Tensor, *others: Any) -> torch.Tensor:
        found.meet(given)
        return linear(given, *others)

    monkeypatch.setattr(torch.nn.Linear, "forward", module)
    monkeypatch.setattr(layers, "linear", function)  # of the engine graph
    return found


@pytest.mark.parametrize(
    ("engine", "batching", "shapes"),
    [("transformers", "sorted", 3), ("graph", "static", 3), ("graph", "continuous", 1)],
)
def test_the_first_generation_of_a_process_is_timed_like_the_next(
    worker: Worker, planted: Planted, dataset: str, engine: str, batching: str, shapes: int
) -> None:

    def job(**changes: Any) -> Result:
        chosen = {"engine": engine, "batching": batching, "measure": SETTINGS} | changes
        chosen["precision"] = "bf16" if engine == "graph" else "fp32"
        return worker.run(dataset, batch_size=3, prompts=7, output_tokens=4, **chosen)

    first, paid = planted.during(job)
    assert "measure" not in paid and paid["warmup"] >= 3
    assert (first.shapes, first.shapes_unmet, first.warmup_end) == (shapes, 0, "complete")
    assert first.warmup_s > paid["warmup"] * COST_S
    second, paid = planted.during(job)
    assert paid == {} and second.shapes == shapes
    planted.known.clear()
    cold, paid = planted.during(lambda: job(measure=replace(SETTINGS, warmup=0, max_repeats=2)))
    assert "measure" in paid and cold.shapes_unmet is None and cold.warmup_end is None


def test_the_first_training_of_a_process_is_timed_like_the_next_and_leaves_no_trace(
    worker: Worker, planted: Planted, small_model: str
) -> None:
    changed = {"model": small_model, "method": "full", "learning_rate": 1e-2}

    def job(warmup: int = 1) -> Result:
        settings = MeasureSettings(warmup=warmup, time_limit_s=600)
        return train(worker, measure=settings, steps=5, samples=24, **changed)

    first, paid = planted.during(job)
    assert paid.keys() == {"warmup"}
    lengths = {sample.computed_tokens for sample in first.samples if not sample.warmup}
    assert first.shapes == len(lengths) > 1
    assert (first.shapes_unmet, first.warmup_end) == (0, "complete")
    assert first.warmup_steps is not None and first.shapes is not None
    assert first.warmup_steps >= first.shapes + 2  # one shape settles, and one step is real
    second, paid = planted.during(job)
    assert paid == {} and losses(second) == losses(first)
    assert {worker.loaded[key] for key in worker.loaded if key.startswith("finetuning|")} == {None}
    planted.known.clear()
    cold, paid = planted.during(lambda: job(0))
    assert "measure" in paid
    assert losses(cold) == losses(first)[:5]


def test_rehearsals_of_training_stop_at_the_limit_of_warm_up(worker, monkeypatch) -> None:
    """One shape is met, the largest, for which memory is then taken."""
    rehearsed: list[set[tuple[int, ...]]] = []
    rehearse = Steps.rehearse

    def seen(self: Steps, step: Any) -> set[tuple[int, ...]]:
        rehearsed.append(rehearse(self, step))
        return rehearsed[-1]

    monkeypatch.setattr(Steps, "rehearse", seen)
    settings = MeasureSettings(warmup=1, time_limit_s=600, warmup_limit_s=1e-6)
    result = train(worker, measure=settings, steps=4, samples=24, batch_size=2, max_length=256)
    timed = [sample.computed_tokens for sample in result.samples if not sample.warmup]
    (((rows, length),),) = rehearsed
    assert timed[0] < rows * length == max(timed)
    assert result.details["memory_reserved_at"] == f"{rows} x {length}"
    assert (result.warmup_end, result.shapes_unmet) == ("limit", (result.shapes or 0) - 1)
    assert sum(not sample.warmup for sample in result.samples) == 4
