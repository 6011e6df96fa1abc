"""Text generation on the embedded model: what comes out, what is counted, what is timed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_cases import MODEL, ONCE, PROMPTS, Worker, request, write_dataset
from hypothesis import given
from hypothesis import strategies as st

from workloads.base import BadConfiguration, DataMissing, MeasureSettings, Unsupported
from workloads.devices import device_for
from workloads.engines.loaded import Generated, Generation
from workloads.engines.passes import BatchedPass, Prompt
from workloads.engines.transformers.generation import TransformersEngine, load
from workloads.models import precision
from workloads.models.loading import load_tokenizer, open_model
from workloads.models.prompts import NotRendered, encode_prompt
from workloads.registry import TaskSpec
from workloads.text_generation import bring_to_length


@pytest.fixture(scope="module")
def alone(dataset: str) -> dict[int, tuple[int, int, str]]:
    """transformers' own generate on each prompt by itself: input length, output length, text."""
    from transformers import AutoModelForCausalLM

    source = open_model(MODEL)
    tokenizer = load_tokenizer(source)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    ends = set(model.generation_config.eos_token_id)
    found = {}
    for index, text in enumerate(PROMPTS):
        ids = encode_prompt(tokenizer, source, text)
        output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)
        new = output[0, len(ids) :].tolist()
        count = next((n + 1 for n, token in enumerate(new) if token in ends), len(new))
        found[index] = (len(ids), count, tokenizer.decode(new[:count], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("quantized", [False, True])
def test_a_library_that_quantizes_while_it_loads_is_told_the_card(dataset, monkeypatch, quantized):
    """bitsandbytes has to have the weights on the card when it packs them."""
    given: dict[str, Any] = {}

    def load(source: Any, **arguments: Any) -> Any:
        given.update(arguments)
        raise DataMissing("asked enough")

    arguments = {"quantization_config": "four bits"} if quantized else {"dtype": "float32"}
    monkeypatch.setattr(precision, "loading_arguments", lambda *_: dict(arguments))
    monkeypatch.setattr(TaskSpec, "function", lambda *_: load)
    with pytest.raises(DataMissing, match="asked enough"):
        Worker().run(dataset)
    device_map = {"": Worker().context().device.torch_device} if quantized else None
    assert given.pop("device_map", None) == device_map
    assert given == arguments | {"attn_implementation": "sdpa"}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batched_greedy_output_equals_generate_on_each_prompt_alone(
    batch_size: int, worker: Worker, dataset: str, alone: dict[int, tuple[int, int, str]]
) -> None:
    result = worker.run(dataset, batch_size=batch_size)
    found = {i.index: (i.input_tokens, i.output_tokens, i.output_text) for i in result.items}
    assert found == alone and len({count for _, count, _ in alone.values()}) > 2
    assert sum(s.output_tokens for s in result.samples) == sum(n for _, n, _ in alone.values())
    assert sum(s.input_tokens for s in result.samples) == sum(n for n, _, _ in alone.values())
    assert sum(s.items for s in result.samples) == len(PROMPTS)


def test_padding_is_computed_but_not_counted(worker: Worker, dataset: str) -> None:
    result = worker.run(dataset, batch_size=8)
    (sample,) = result.samples
    longest = max(item.input_tokens for item in result.items)
    steps = 1 + len(sample.step_s)
    assert steps == max(item.output_tokens for item in result.items)
    assert sample.computed_tokens == 8 * (longest + steps - 1)
    assert sample.input_tokens + sample.output_tokens < sample.computed_tokens


def test_ignore_eos_generates_exactly_output_tokens(worker: Worker, dataset: str) -> None:
    result = worker.run(dataset, batch_size=3, ignore_eos=True, output_tokens=20)
    assert {item.output_tokens for item in result.items} == {20}
    assert all(len(sample.step_s) == 19 for sample in result.samples)
    assert sum(s.output_tokens for s in result.samples) == 20 * len(PROMPTS)


@pytest.mark.parametrize("length", [3, 40])
def test_input_tokens_brings_every_prompt_to_one_length(length, worker, dataset) -> None:
    result = worker.run(dataset, input_tokens=length, batch_size=4, output_tokens=4)
    assert {item.input_tokens for item in result.items} == {length}
    for sample in result.samples:
        assert sample.input_tokens == 4 * length
        assert sample.computed_tokens == 4 * (length + len(sample.step_s))


def test_settings_of_one_job_do_not_leak_into_the_next(worker, dataset, alone) -> None:
    worker.run(dataset, ignore_eos=True, output_tokens=30, batch_size=4)
    result = worker.run(dataset, batch_size=4)
    assert {i.index: i.output_text for i in result.items} == {
        index: text for index, (_, _, text) in alone.items()
    }
    config = next(iter(worker.loaded.values())).engine.model.generation_config
    assert config.eos_token_id is config.max_new_tokens is None


def test_a_checkpoints_own_generation_settings_do_not_count(worker, dataset, tmp_path) -> None:
    """Sampling and penalties that come with a model would make two models do unlike work."""
    copy = tmp_path / "model"
    shutil.copytree(open_model(MODEL).path, copy)
    settings = json.loads((copy / "generation_config.json").read_text())
    settings |= {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0, "num_beams": 2}
    (copy / "generation_config.json").write_text(json.dumps(settings))
    plain = worker.run(dataset, batch_size=4)
    other = Worker().run(dataset, batch_size=4, model=str(copy))
    assert [i.output_text for i in other.items] == [i.output_text for i in plain.items]


def test_a_small_dataset_is_gone_through_until_a_batch_is_full(worker, tmp_path) -> None:
    three = write_dataset(tmp_path / "three.json", PROMPTS[:3])
    result = worker.run(three, batch_size=7, prompts=2, output_tokens=2)
    assert [item.index for item in result.items] == [0, 1, 2, 0, 1, 2, 0]


def test_the_result_says_what_it_is(worker: Worker, dataset: str) -> None:
    result = worker.run(dataset, keep_texts=2)
    assert result.random_weights and not result.synthetic_data
    assert worker.run("advertisegen-synthetic", output_tokens=2, prompts=2).synthetic_data
    assert result.parameter_count and result.weight_bytes == 4 * result.parameter_count
    assert result.precision_detail == "float32 weights and products"
    assert result.details["attention"] == "sdpa"
    eager = Worker().run(dataset, attention="eager", output_tokens=2, prompts=2)
    assert eager.details["attention"] == "eager"
    assert result.peak_device_memory_bytes is None
    assert result.peak_host_memory_bytes and result.baseline_host_memory_bytes
    assert all(item.output_text is item.output_ids is None for item in result.items[2:])
    tokenizer = load_tokenizer(open_model(MODEL))
    for item in result.items[:2]:
        assert item.output_ids is not None and len(item.output_ids) == item.output_tokens
        decoded = tokenizer.decode(item.output_ids, skip_special_tokens=True)
        assert decoded == item.output_text
    assert result.tokenization_s and result.detokenization_s
    assert result.details["end_token_ids"] == "2 4610 4612"
    fixed = worker.run(dataset, output_tokens=2, ignore_eos=True, prompts=2, keep_texts=0)
    assert "end_token_ids" not in fixed.details and fixed.detokenization_s
    assert all(item.output_ids is None for item in fixed.items)


def test_what_cannot_run_says_why(worker, dataset) -> None:
    with pytest.raises(BadConfiguration, match="more than the model's 8192 positions"):
        worker.run(dataset, output_tokens=9000)
    with pytest.raises(Unsupported, match="no cpu kernels"):
        Worker().run(dataset, attention="flash_attention_2")


def test_an_engine_without_the_model_s_window_writes_up_to_it(worker, dataset, monkeypatch) -> None:
    asked = {"input_tokens": 20, "prompts": 2}
    worker.run(dataset, output_tokens=10, **asked)
    for resident in worker.loaded.values():
        monkeypatch.setattr(type(resident.engine), "window", 30)
    worker.run(dataset, output_tokens=10, **asked)
    with pytest.raises(Unsupported, match="layers of the model see 30 positions only"):
        worker.run(dataset, output_tokens=11, **asked)


@given(ids=st.lists(st.integers(), min_size=1, max_size=9), length=st.integers(1, 40))
def test_a_prompt_is_cut_or_repeated_to_length(ids: list[int], length: int) -> None:
    assert bring_to_length(ids, length) == [ids[n % len(ids)] for n in range(length)]


class ScriptedEngine:
    """Gives scripted tokens, one step at a time, each of which takes a scripted time."""

    end_token_ids = frozenset({9})

    def __init__(self, clock: list[float], rows: list[list[int]], steps: list[float]) -> None:
        self.clock, self.rows, self.steps = clock, rows, steps

    def prepare(self, prompts: Sequence[Sequence[int]]) -> int:
        return len(prompts)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def generate(self, prepared: int, generation: Generation) -> Callable[[], Generated]:
        for seconds in self.steps:
            self.clock[0] += seconds
            generation.on_step()
        return lambda: Generated(tokens=self.rows, computed_tokens=99)


def scripted(clock: list[float], rows: list[list[int]], steps: list[float]) -> BatchedPass:
    return BatchedPass(
        ScriptedEngine(clock, rows, steps),
        [[Prompt(index=n, ids=(1, 2)) for n in range(len(rows))]],
        output_tokens=max(8, len(steps)),
        ignore_eos=False,
        keep_texts=3,
        synchronize=lambda: None,
        clock=lambda: clock[0],
    )


@given(
    steps=st.lists(st.floats(0.001, 3.0), min_size=1, max_size=12),
    ends=st.lists(st.integers(0, 15), min_size=1, max_size=4),
)
def test_first_token_and_steps_add_up_to_the_batch(steps: list[float], ends: list[int]) -> None:
    clock = [100.0]
    rows = [[9 if n == end else 1 for n in range(len(steps))] for end in ends]
    generation = scripted(clock, rows, steps)
    seen = generation.run_batch(0, 0)()
    assert seen.ttft_s == pytest.approx(steps[0])
    assert seen.step_s == pytest.approx(tuple(steps[1:]))
    counts = [min(end + 1, len(steps)) for end in ends]
    assert seen.output_tokens == sum(counts)
    items, _ = generation.texts.of(0, lambda: clock[0])
    for item, count in zip(items, counts, strict=True):
        assert item.output_tokens == count
        assert item.latency_s == pytest.approx(sum(steps[:count]))
        assert item.ttft_s == pytest.approx(steps[0])


@pytest.mark.parametrize("computed", [1, 5])
def test_two_moments_are_no_steps_unless_two_tokens_were_computed(computed: int) -> None:
    """An engine that tells of its first token and its end alone may compute on behind the end of
    all texts, or write one token: the time between the two is then that of no single step."""
    seen = scripted([100.0], [[9] * computed], [0.5, 2.0]).run_batch(0, 0)()
    assert (seen.step_s, seen.ttft_s, seen.output_tokens) == ((), pytest.approx(0.5), 1)


def test_items_are_those_of_the_last_complete_repeat(worker: Worker, dataset: str) -> None:
    settings = dataclasses.replace(ONCE, warmup=1, max_repeats=2)
    result = worker.run(dataset, batch_size=3, output_tokens=2, measure=settings)
    assert [item.index for item in result.items] == list(range(len(PROMPTS)))
    repeats = {s.repeat for s in result.samples}  # more where the beginning proved slow
    assert repeats == set(range(len(repeats))) and len(repeats) >= 3


def test_a_job_cut_by_its_time_limit_keeps_what_it_measured(worker: Worker, dataset: str) -> None:
    settings = MeasureSettings(warmup=0, time_limit_s=0.0)
    result = worker.run(dataset, batch_size=2, output_tokens=2, measure=settings)
    assert result.stop_reason == "time_limit"
    assert [(s.batch, s.complete) for s in result.samples] == [(0, False)]
    assert [item.index for item in result.items] == [0, 1]


@pytest.mark.parametrize(
    ("too_long", "texts", "name", "detail"),
    [
        ("cut", 3, "prompts_cut", "1, to 60 tokens"),
        ("skip", 2, "prompts_left_out", "1; the first: 10"),
    ],
)
def test_prompts_without_room_are_cut_or_left_out_and_counted(
    tmp_path: Path, too_long: str, texts: int, name: str, detail: str
) -> None:
    path = write_dataset(tmp_path / "d.jsonl", ["你好", "裙" * 100, "上衣"])
    changes = {"output_tokens": 4, "prompts": 3, "batch_size": 1}
    worker = Worker()
    worker.run(path, **changes)
    ((key, resident),) = worker.loaded.items()
    short = dataclasses.replace(resident.engine, context_length=64)
    worker.loaded[key] = dataclasses.replace(resident, engine=short)
    with pytest.raises(BadConfiguration, match="write too_long: cut or skip"):
        worker.run(path, **changes)
    result = worker.run(path, too_long=too_long, **changes)
    assert len({item.index for item in result.items}) == texts
    assert result.details[name].startswith(detail)


def test_a_step_may_write_several_tokens_of_which_none_is_lost(small_model: str) -> None:
    class Lookup(TransformersEngine):
        def config(self, prepared: Any, generation: Generation) -> Any:
            config = TransformersEngine.config(self, prepared, generation)
            config.prompt_lookup_num_tokens = 4
            return config

    job = request("advertisegen-synthetic", model=small_model, batch_size=1)
    plain = load(job, device_for("cpu"))
    with torch.no_grad():
        plain.model.get_output_embeddings().weight.zero_()  # one token again and again: guessable
    engine = Lookup(**{each.name: getattr(plain, each.name) for each in dataclasses.fields(plain)})
    steps: list[None] = []
    generation = Generation(output_tokens=20, on_step=lambda: steps.append(None))
    prepared = engine.prepare([engine.encode(PROMPTS[0])])
    done = engine.generate(prepared, generation)()
    assert len(steps) < 15 and len(done.tokens[0]) == 20
    assert done.computed_tokens == prepared.input_ids.shape[1] + 19


def test_a_conversation_that_the_chat_template_refuses_is_left_out(worker, tmp_path, monkeypatch):
    encode = TransformersEngine.encode

    def refusing(self: Any, text: str, earlier: Sequence[Any] = ()) -> list[int]:
        if text == "odd":
            raise NotRendered("roles must alternate")
        return encode(self, text, earlier)

    monkeypatch.setattr(TransformersEngine, "encode", refusing)
    changes = {"output_tokens": 2, "prompts": 3, "batch_size": 1}
    path = write_dataset(tmp_path / "d.jsonl", ["你好", "odd", "上衣"])
    result = worker.run(path, **changes)
    assert [item.index for item in result.items] == [0, 2, 0]
    assert result.details["prompts_left_out"] == "1; the first: roles must alternate"
    path = write_dataset(tmp_path / "most.jsonl", ["odd", "odd", "上衣"])
    with pytest.raises(BadConfiguration, match="must alternate"):
        worker.run(path, **changes)
