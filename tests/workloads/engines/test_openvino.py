"""The engine openvino: its loop over a stand-in of the library, and texts where it is installed."""

from __future__ import annotations

import sys
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generation_cases import Worker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workloads.base import BadConfiguration, Unsupported
from workloads.devices import device_for
from workloads.engines.loaded import ContinuousGeneration
from workloads.engines.openvino.generation import OpenVinoEngine, Pipeline


class Status(Enum):
    RUNNING, FINISHED, IGNORED = range(3)


class Library:
    """openvino_genai as far as the loop uses it: a text is its number, counted up."""

    GenerationStatus = Status
    GenerationConfig = SchedulerConfig = SimpleNamespace

    def __init__(self, *, gives_up: bool = False) -> None:
        self.most = 0
        self._gives_up = gives_up
        self._running: list[Any] = []

    def ContinuousBatchingPipeline(self, *_: Any) -> Library:
        return self

    def add_request(self, index: int, prompt: int, config: Any) -> Any:
        assert config.eos_token_id in config.stop_token_ids  # as the library asks
        fresh: list[int] = []

        def read() -> dict[int, Any]:
            output = SimpleNamespace(generated_ids=list(fresh))
            fresh.clear()
            return {0: output}

        text = SimpleNamespace(ids=[], fresh=fresh, prompt=prompt, config=config)
        text.status = Status.IGNORED if self._gives_up else Status.RUNNING
        self._running.append(text)
        return SimpleNamespace(
            can_read=lambda: bool(fresh), read=read, get_status=lambda: text.status
        )

    def step(self) -> None:
        self.most = max(self.most, len(self._running))
        for text in [] if self._gives_up else self._running:
            text.ids.append(text.prompt + len(text.ids))
            text.fresh.append(text.ids[-1])
            ended = not text.config.ignore_eos and text.ids[-1] in text.config.stop_token_ids
            if ended or len(text.ids) == text.config.max_new_tokens:
                text.status = Status.FINISHED
        self._running = [text for text in self._running if text.status is Status.RUNNING]


def engine() -> OpenVinoEngine:
    others = {each.name: None for each in fields(OpenVinoEngine)}
    return OpenVinoEngine(**others | {"pipeline": Pipeline(Path(), "f32")})


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompts=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    places=st.integers(1, 5),
    steps=st.integers(1, 6),
    ends=st.sampled_from([(), (7,), (3, 11)]),
)
def test_every_text_has_a_place_of_its_own_and_all_its_tokens(
    monkeypatch, prompts, places, steps, ends
) -> None:
    """Never more texts than places; in their order; each up to its end, which is among its tokens;
    a moment for each token."""
    library = Library()
    monkeypatch.setitem(sys.modules, "openvino_genai", library)
    admitted: list[int] = []
    told = [0] * len(prompts)

    def on_step(indices) -> None:
        for index in indices:
            told[index] += 1

    calls = {"on_admit": admitted.extend, "on_step": on_step}
    generation = ContinuousGeneration(slots=places, output_tokens=steps, ends=ends, **calls)
    found = engine().write(prompts, generation)
    assert admitted == list(range(len(prompts)))
    assert library.most == min(places, len(prompts))
    for prompt, ids, moments in zip(prompts, found, told, strict=True):
        whole = list(range(prompt, prompt + steps))
        end = next((place for place, token in enumerate(whole) if token in ends), steps)
        assert ids == whole[: end + 1] and moments == len(ids)


def test_a_text_that_the_library_gives_up_ends_the_job(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino_genai", Library(gives_up=True))
    with pytest.raises(BadConfiguration, match="gave up a text after 0 tokens"):
        engine().write([1], ContinuousGeneration(slots=1, output_tokens=2))


def test_too_few_threads_are_said_before_the_library_dies_of_them(monkeypatch) -> None:
    """Of SIGFPE, which would be three crashes of a worker; also where a later job has fewer."""
    monkeypatch.setitem(sys.modules, "openvino_genai", Library())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    pipeline = Pipeline(Path(), "bf16", least_threads=2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with pytest.raises(Unsupported, match="fewer threads than 2, and this one has 1"):
        pipeline.take_threads()


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("openvino_genai")


@pytest.mark.slow
def test_in_fp32_texts_are_those_of_plain_generate(library, dataset, monkeypatch) -> None:
    """Static and continuous batches; a moment for each step; nothing is padded; the logits of its
    graph are torch's. Other precisions are made of the same graph and store less."""
    worker = Worker()
    plain = worker.run(dataset, batch_size=3)
    expected = {item.index: item.output_ids for item in plain.items}
    engine = "openvino"
    for batching in ("static", "continuous"):
        found = worker.run(dataset, batch_size=3, engine=engine, batching=batching)
        assert {item.index: item.output_ids for item in found.items} == expected
        assert found.metrics["export_s"] > 0 and found.details["kv_cache"] == "f32"
        for sample in found.samples:
            assert sample.step_s and sum(sample.step_s) <= sample.wall_s
            tokens = sample.input_tokens + sample.output_tokens - sample.items
            assert sample.computed_tokens == tokens
    found = worker.run(dataset, batch_size=3, engine=engine, ignore_eos=True)
    assert all(sample.output_tokens == 24 * sample.items for sample in found.samples)
    ours, theirs = (worker.loaded[key].engine for key in sorted(worker.loaded))
    text = SimpleNamespace(prompt=ours.encode("类型#裙"), answer=[5, 9, 200])
    (a,), (b,) = ours.answer_logits([text]), theirs.answer_logits([text])
    assert torch.allclose(a, b, atol=1e-3)
    shares = {"bf16": 0.51, "int8": 0.27, "int4": 0.21}
    able = device_for("cpu").lacks("bf16") is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # as bf16 needs
    for precision, share in shares.items():
        if precision == "bf16" and not able:
            continue
        pytest.importorskip("nncf")
        made = worker.run(dataset, batch_size=3, engine=engine, precision=precision)
        assert made.weight_bytes < share * plain.weight_bytes
        assert sum(sample.output_tokens for sample in made.samples) > 0
