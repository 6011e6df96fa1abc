"""Stock transformers with static shapes: the same tokens, from two graphs for each shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from generation_cases import PROMPTS, Worker, request

from workloads.base import MeasureSettings, Unsupported
from workloads.devices.cpu import CpuDevice
from workloads.engines.loaded import Generated, Generation
from workloads.engines.torch_models import BUCKET
from workloads.engines.transformers.generation import (
    LOOK,
    StaticShapesEngine,
    TransformersEngine,
    compiled,
    load,
)

pytestmark = pytest.mark.slow  # compiles


class Compiles(CpuDevice):
    """A processor that hands graphs to torch as they are."""

    compile_backend = "eager"


@pytest.fixture(scope="module")
def engines(small_model: str) -> Iterator[tuple[TransformersEngine, StaticShapesEngine]]:
    """The same checkpoint twice: plain, and compiled for static shapes."""
    job = request("advertisegen-synthetic", model=small_model)
    torch.compiler.reset()
    static = compiled(replace(load(job, Compiles()), device=Compiles()))
    yield load(job, CpuDevice()), static
    torch.compiler.reset()


def generate(engine: TransformersEngine, prompts: list[str], **options: Any) -> Generated:
    ids = [engine.encode(prompt) for prompt in prompts]
    steps: list[None] = []
    options = {"output_tokens": 20, "keep_logits": True} | options
    generation = Generation(on_step=lambda: steps.append(None), **options)
    done = engine.generate(engine.prepare(ids), generation)()
    assert not isinstance(engine, StaticShapesEngine) or len(steps) == 2  # the first, the end
    return done


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@torch._dynamo.config.patch(recompile_limit=1)
def test_tokens_are_those_of_transformers_and_no_step_is_a_new_shape(engines) -> None:
    """Batches of three, of two and of three again, of unlike lengths: each shape is compiled once,
    for reading and for writing, whatever number the process allows; and what an earlier batch left
    in the cache is not seen."""
    plain, static = engines
    before, made = graphs(), []
    for prompts in (PROMPTS[:3], PROMPTS[3:5], PROMPTS[5:8]):
        expected, found = generate(plain, prompts), generate(static, prompts)
        assert found.tokens == expected.tokens
        apart = [(a - b).abs().max() for a, b in zip(found.logits, expected.logits, strict=True)]
        assert len(apart) == 20 and max(apart) < 1e-4
        longest = max(len(plain.encode(prompt)) for prompt in prompts)
        positions = static.padded_length(longest)
        assert positions == BUCKET * math.ceil(longest / BUCKET)
        assert found.computed_tokens == len(prompts) * (positions + 19)
        made.append(graphs() - before)
    assert made == [2, 4, 4]


def test_texts_that_have_ended_are_noticed(engines) -> None:
    plain, static = engines
    free = generate(plain, PROMPTS[:3], keep_logits=False)
    ends = frozenset(row[3] for row in free.tokens)  # all end with their fourth token, or sooner
    found = generate(static, PROMPTS[:3], ends=ends)
    assert [len(row) for row in found.tokens] == [LOOK] * 3
    assert [row[:4] for row in found.tokens] == [row[:4] for row in free.tokens]


def test_a_model_that_cannot_have_a_static_cache_is_refused(engines, monkeypatch) -> None:
    plain, _ = engines
    monkeypatch.setattr(type(plain.model), "_can_compile_fullgraph", False)
    with pytest.raises(Unsupported, match="write hpu_mode: eager, or leave torch_compile"):
        compiled(plain)


def test_a_job_that_asks_for_torch_compile_meets_its_shapes_before_timing(
    small_model: str, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts are those of the plain model; warm-up makes the graphs, and timing none."""
    monkeypatch.setattr(CpuDevice, "compile_backend", "eager")
    once = MeasureSettings(warmup=1, min_repeats=1, max_repeats=1, warmup_limit_s=0.0)
    usual: dict[str, Any] = {"model": small_model, "output_tokens": 4, "batch_size": 8}
    plain = Worker().run(dataset, **usual)
    torch.compiler.reset()
    known = CpuDevice().compilations()
    try:
        found = Worker().run(dataset, **usual, measure=once, torch_compile=True)
        counted = CpuDevice().compilations().since(known)
    finally:
        torch.compiler.reset()
    assert [i.output_text for i in found.items] == [i.output_text for i in plain.items]
    assert found.details["torch_compile"] == found.details["static_shapes"] == "true"
    assert found.timed_compilations == 0 and found.shapes_unmet == 0
    assert counted.graphs and counted.compile_s and counted.compile_s > 0
