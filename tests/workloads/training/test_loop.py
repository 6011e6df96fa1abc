"""Fine-tuning on the embedded model: every method trains, and the row says what was done."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from finetuning_cases import losses, train, trained
from generation_cases import MODEL

from workloads.base import (
    DIVERGED,
    NOTHING_LEARNED,
    BadConfiguration,
    MeasureSettings,
    Result,
    whole_sample,
)
from workloads.data.datasets import load_examples
from workloads.data.shapes import Turn
from workloads.models.loading import load_causal_model, load_tokenizer, open_model
from workloads.models.prompts import encode_answer, encode_prompt
from workloads.training.data import NOT_LEARNED, TrainingSample, encode_samples
from workloads.training.losses import loss_details

RATE = {"vera": 0.3}  # its vectors start small


@pytest.fixture(scope="module")
def lora() -> Result:
    return train(measure=MeasureSettings(warmup=1, time_limit_s=600))


def learned(method: str, precision: str) -> Result:
    rate = RATE.get(method, 1e-2)
    return trained(method=method, precision=precision, learning_rate=rate, samples=4)


def samples_of(dataset: str, count: int, first: int = 0) -> list[TrainingSample]:
    source, examples = open_model(MODEL), load_examples(dataset)[first:]
    return encode_samples(examples, count, load_tokenizer(source), source, 160).samples


def plain_loss(samples: list[TrainingSample]) -> float:
    """The embedded model's mean loss of a learned token, by transformers, sample by sample."""
    model = load_causal_model(open_model(MODEL), dtype=torch.float32).eval()
    total = 0.0
    for sample in samples:
        ids, labels = torch.tensor([sample.ids]), torch.tensor([sample.labels])
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * sample.learned_tokens
    return total / sum(sample.learned_tokens for sample in samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "precision", "trainable", "detail"),
    [
        ("full", "fp32", 3_075_008, "fp32 weights"),
        ("full", "bf16", 3_075_008, "bf16 weights"),
        ("lora", "bf16", 28_672, "bf16 weights; lora adapter in float32"),
        ("dora", "fp32", 29_952, "fp32 weights; dora adapter in float32"),
        ("vera", "fp32", 4_352, "fp32 weights; vera adapter in float32"),
        ("qlora", "bf16", 28_672, "NF4 base, bf16 products; qlora adapter in float32"),
        ("qat", "fp32", 3_075_008, "fp32 weights, rounded to int4 in groups of 32"),
        ("qat-lora", "fp32", 28_672, "rounded to int4 in groups of 32"),
    ],
)
def test_every_method_learns(method: str, precision: str, trainable: int, detail: str) -> None:
    result = learned(method, precision)
    assert result.trainable_parameter_count == trainable
    assert detail in result.precision_detail
    assert "loss_flag" not in result.details
    before = result.metrics["first_batch_loss_before"]
    assert before == pytest.approx(losses(result)[0], rel=1e-5)
    assert result.metrics["first_batch_loss_after"] < before - 0.01
    if method == "qlora":  # its base takes less memory than bf16 would
        assert result.weight_bytes and result.weight_bytes < 0.8 * 2 * 3_075_008
    if method.startswith("qat"):
        assert result.details["converted"].startswith("24 layers to int4 weights")
        # An adapter is added to rounded weights in training and rounded with them afterwards.
        after, tolerance = (
            result.metrics["first_batch_loss_after"],
            2e-4 if method == "qat" else 2e-2,
        )
        assert result.metrics["converted_loss"] == pytest.approx(after, abs=tolerance)


@pytest.mark.slow
def test_a_4_bit_base_learns_after_trials_in_evaluation() -> None:
    """In which bitsandbytes would leave its weights in a layout without a backward pass."""
    trials = {"padding": "packing", "logits": "chunked"}
    result = trained(method="qlora", precision="bf16", learning_rate=1e-2, samples=4, **trials)
    assert losses(result) == pytest.approx(losses(learned("qlora", "bf16")), abs=0.02)


def test_each_step_is_a_sample(lora: Result) -> None:
    steps = [(sample.repeat, sample.batch, sample.warmup) for sample in lora.samples]
    assert steps == [(number, 0, number == 0) for number in range(4)]
    assert lora.stop_reason == "max_repeats"
    for sample in lora.samples:
        assert sample.items == 4 and sample.output_tokens == 0 and sample.complete
        parts = (sample.data_s, sample.forward_s, sample.backward_s, sample.optimizer_s)
        assert all(part is not None and part > 0 for part in parts)
        assert sum(part for part in parts if part is not None) <= sample.wall_s


def test_padding_is_computed_but_not_counted_and_the_first_loss_is_the_models(lora: Result) -> None:
    samples = samples_of("advertisegen-synthetic", 32)
    for step, sample in enumerate(lora.samples):
        lengths = [len(one.ids) for one in samples[4 * step : 4 * step + 4]]
        counts = (sample.input_tokens, sample.computed_tokens)
        assert counts == (sum(lengths), 4 * max(lengths))
    assert any(s.input_tokens < s.computed_tokens for s in lora.samples)
    assert losses(lora)[0] == pytest.approx(plain_loss(samples[:4]), abs=1e-5)


@pytest.mark.slow
def test_the_loss_on_held_out_answers_is_that_of_the_trained_model(tmp_path: Path) -> None:
    records = [{"content": f"类型#裙{n}", "summary": f"裙{n}" * (n + 1)} for n in range(9)]
    data = tmp_path / "nine.json"
    data.write_text("\n".join(map(json.dumps, records)))
    small = {"dataset": str(data), "held_out": 4, "samples": 9, "batch_size": 2, "steps": 2}
    plain = plain_loss(samples_of(str(data), 4, first=5))
    still = train(**small, learning_rate=1e-30)
    assert still.metrics["held_out_loss"] == pytest.approx(plain, rel=1e-4)
    moved = train(**small, learning_rate=1e-2)
    assert moved.metrics["held_out_loss"] != pytest.approx(plain, rel=1e-3)
    expected = moved.metrics["held_out_loss"]
    rows = {"padding": "packing", "packed_attention": "apart", "packed_length": "longest"}
    # What is held out is longer.
    filled = train(**small, learning_rate=1e-2, **rows, gradient_accumulation=2)
    assert filled.metrics["held_out_loss"] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(BadConfiguration, match=r"held_out is 9, and .* has 9 examples"):
        train(**small | {"held_out": 9})


def test_samples_end_as_the_model_should() -> None:
    source = open_model(MODEL)
    tokenizer = load_tokenizer(source)
    examples = load_examples("advertisegen-synthetic")
    whole = encode_samples(examples, 8, tokenizer, source, 4000).samples
    for example, sample in zip(examples, whole, strict=False):
        prompt = encode_prompt(tokenizer, source, example.content)
        assert list(sample.ids[: sample.prompt_tokens]) == prompt
        assert sample.ids[-1] == tokenizer.eos_token_id
        answer = tokenizer.decode(sample.ids[sample.prompt_tokens : -1])
        assert answer.strip() == example.summary
    for sample in encode_samples(examples, 8, tokenizer, source, 24).samples:
        assert len(sample.ids) == 24 and sample.learned_tokens >= 12


def test_the_row_says_what_it_is(lora: Result) -> None:
    assert lora.random_weights and lora.synthetic_data
    assert lora.parameter_count and lora.weight_bytes == 4 * lora.parameter_count
    assert lora.details["adapter"] == "rank 8, alpha 16 on q_proj, k_proj, v_proj"
    assert lora.tokenization_s is not None and lora.tokenization_s > 0
    linear = lora.parameter_count - 4672 * 192 - (2 * 4 + 1) * 192 - 4 * (192 + 2 * 64)
    # 2 operations a weight forward, 2 back to the inputs, 2 more for what is trained.
    # The adapter's own layers are linear layers as well; below the first one nothing is trained.
    expected = 4 * (linear + 28_672) + 2 * 28_672 - 2 * 192 * 192
    assert lora.train_flops_per_token == expected


@pytest.mark.parametrize(
    ("seen", "after", "flag", "diverged"),
    [
        ([2.0, 1.5, 1.0], 1.0, "", False),
        ([2.0, 2.1, 2.2], 2.2, "did not fall: 2 before, 2.2 after", False),
        ([2.0, 5.0, 9.0], 9.0, "did not fall", True),
        ([2.0, math.nan, math.nan], math.nan, "no number in 2 of 3 steps, first at step 1", True),
    ],
)
def test_losses_that_rise_or_are_no_numbers_are_told(seen, after, flag, diverged) -> None:
    step = whole_sample(wall_s=1.0, cpu_s=1.0, items=1, input_tokens=1)
    steps = [replace(step, repeat=number, loss=loss) for number, loss in enumerate(seen)]
    told = loss_details(seen[0], after, steps)
    assert flag in told.get("loss_flag", "") and bool(told) == bool(flag)
    assert (DIVERGED in told) == diverged


def test_samples_without_labels_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unlabelled = property(lambda sample: [NOT_LEARNED] * len(sample.ids))
    monkeypatch.setattr(TrainingSample, "labels", unlabelled)
    monkeypatch.setattr(TrainingSample, "learned_tokens", property(lambda sample: 0))
    assert "no token has a label" in train(steps=1).details[NOTHING_LEARNED]


def test_a_job_cut_by_its_time_limit_keeps_its_steps() -> None:
    result = train(measure=MeasureSettings(warmup=0, time_limit_s=0.0))
    assert result.stop_reason == "time_limit" and len(result.samples) == 1


@pytest.mark.slow
def test_a_probe_takes_the_longest_samples_twice() -> None:
    result = train(probe=True, steps=50, batch_size=2, save_adapter="never", max_length=400)
    plain = train(steps=2, batch_size=2, max_length=400)
    assert len(result.samples) == 2 and "saved_adapter" not in result.details
    assert result.samples[0].input_tokens == result.samples[1].input_tokens
    assert result.samples[0].input_tokens > max(sample.input_tokens for sample in plain.samples)


@pytest.mark.parametrize(
    ("record", "columns", "learned"),
    [
        ({"text": "Examples without an answer are learned whole."}, "", "every token of the text"),
        ({"q": "One?", "a": "1"}, "prompt=q, completion=a", "the answer"),
    ],
)
def test_data_of_ones_own_is_learned_from(tmp_path, record, columns, learned) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(record)}\n" * 8)
    result = train(dataset=str(path), samples=8, steps=1, columns=columns)
    assert result.details["learned"] == learned
    assert losses(result)[0] > 0 and not result.synthetic_data


def test_a_model_with_no_layer_left_to_learn_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="the model has 4 layers"):
        train(method="full", freeze_layers=4)


def test_the_answer_of_a_chat_template_follows_its_prompt() -> None:
    tokenizer = load_tokenizer(open_model(MODEL))
    tokenizer.init_kwargs.pop("prompt_layout")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    ids = encode_answer(tokenizer, "问", "显瘦")
    assert tokenizer.decode(ids).strip() == "显瘦</s>"
    earlier = (Turn(role="user", text="一"), Turn(role="assistant", text="二"))
    asked = encode_prompt(tokenizer, None, "问", earlier)
    whole = [*asked, *encode_answer(tokenizer, "问", "显瘦", earlier)]
    text = "<user>一</s><assistant>二</s><user>问</s><assistant>显瘦</s>"
    assert tokenizer.decode(whole).replace(" ", "") == text
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(BadConfiguration, match="refuses the turns user, assistant, user: no sys"):
        encode_prompt(tokenizer, None, "问", earlier)
    tokenizer.chat_template = None
    assert encode_answer(tokenizer, "问", "显瘦")[-1] == tokenizer.eos_token_id
