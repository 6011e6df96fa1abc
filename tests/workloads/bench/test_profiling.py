"""A profile of two untimed steps: its figures, its trace, and that nothing of it remains."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

import pytest
import torch
from finetuning_cases import losses, train, training_of
from generation_cases import Worker

from workloads.bench.profiling import Operator, figures
from workloads.training.loop import profile_steps
from workloads.training.step import Steps

STEPS: dict[str, Any] = {
    "method": "full",
    "steps": 2,
    "batch_size": 2,
    "max_length": 64,
    "held_out": 2,
    "learning_rate": 1e-2,
}


@pytest.mark.slow
def test_a_profiled_job_learns_what_it_would_have_learned(small_model: str) -> None:
    plain, seen = (train(**STEPS, model=small_model, profile=profile) for profile in (False, True))
    assert losses(seen) == losses(plain)
    assert {**seen.metrics} == {**plain.metrics} and "held_out_loss" in seen.metrics
    operators = seen.details["profile_operators"].split("; ")
    assert len(operators) == 10 and operators[0].startswith("aten::")
    assert seen.details["profile"].startswith("2 untimed steps, ")
    assert seen.details["profile_launches"].endswith(" operators a step")
    copied = seen.details["profile_copies"].split("of the time, ")[1]
    assert float(copied.split()[0]) > 0
    assert plain.trace is None and "profile" not in plain.details
    assert seen.trace is not None and seen.details["profile_trace_bytes"] == str(len(seen.trace))
    names = [
        e["name"] for e in json.loads(gzip.decompress(seen.trace))["traceEvents"] if "dur" in e
    ]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    assert "aten::mm" in names and any("AddmmBackward" in n or "MmBackward" in n for n in names)


@pytest.mark.parametrize("divided", [False, True])
def test_a_profile_uses_up_no_random_numbers(divided: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    training = training_of(net)
    training.divided = object() if divided else None

    class Dropping(Steps):
        def __init__(self) -> None:
            self.passes = 0

        def rehearse(self, step: Any) -> Any:
            self.passes += 1
            random.random()
            net(step).sum().backward()

        def untimed(self, step: Any) -> Any:
            self.rehearse(step)
            training.update()

    training.device.seed(7)
    expected = torch.rand(3), random.random()
    training.device.seed(7)
    steps = Dropping()
    profile_steps(training, steps, torch.ones(2, 4))  # type: ignore[arg-type]
    assert steps.passes == 2
    assert (torch.rand(3).tolist(), random.random()) == (expected[0].tolist(), expected[1])


@pytest.mark.slow
def test_generation_is_profiled_over_a_prompt_and_a_token(dataset, small_model) -> None:
    worker, small = Worker(), {"model": small_model, "output_tokens": 4}
    plain, seen = (worker.run(dataset, **small, profile=profile) for profile in (False, True))
    assert [i.output_text for i in seen.items] == [i.output_text for i in plain.items]
    assert len(seen.samples) == len(plain.samples)
    assert seen.trace is not None and "aten::" in seen.details["profile_operators"]


def test_on_a_card_the_time_is_that_of_its_kernels() -> None:
    operators = [
        Operator(name="aten::mm", calls=8, time_us=600.0),
        Operator(name="aten::copy_", calls=4, time_us=200.0),
        Operator(name="aten::view", calls=90, time_us=0.0),
    ]
    events: list[dict[str, Any]] = [
        *({"cat": "kernel", "name": "gemm", "args": {}} for _ in range(10)),
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "args": {"bytes": 4096}},
        {"cat": "cpu_op", "name": "aten::copy_", "args": {"Input Dims": [[8]]}},
        {"ph": "M", "name": "process_name"},
    ]
    assert figures(operators, events, on_card=True) == {
        "profile": "2 untimed steps, 0.4 ms each of kernels",
        "profile_operators": "aten::mm 75.0% (4 calls a step); aten::copy_ 25.0% (2 calls a step); "
        "aten::view 0.0% (45 calls a step)",
        "profile_copies": "25.0% of the time, 2048 bytes a step",
        "profile_launches": "5 kernels a step",
    }


def test_bytes_of_copies_on_the_host_are_those_that_are_written() -> None:
    operators = [Operator(name="aten::copy_", calls=3, time_us=1.0)]
    shapes = [([[2, 3], [2, 3]], ["float", "double"]), ([[4]], ["c10::BFloat16"]), ([[5]], ["odd"])]
    events: list[dict[str, Any]] = [
        {"cat": "cpu_op", "name": "aten::copy_", "args": {"Input Dims": s, "Input type": t}}
        for s, t in shapes
    ]
    told = figures(operators, events, on_card=False)
    assert told["profile_copies"] == "100.0% of the time, 16 bytes a step"
    nothing = {"profile": "no operator of torch ran in this process"}  # an engine's own processes
    assert figures([], [], on_card=False) == nothing
