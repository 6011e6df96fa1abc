"""Techniques: each changes what it is meant to change, and nothing of what is learned."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finetuning_cases import losses, parameters, small_model, trained, training_of
from hypothesis import given
from hypothesis import strategies as st

from workloads.base import Result, Unsupported
from workloads.devices import device_for
from workloads.training import data, methods
from workloads.training.data import NOT_LEARNED, TrainingSample, cut
from workloads.training.losses import ChunkedLoss, next_token_loss
from workloads.training.methods import method_of
from workloads.training.techniques.optimization import Freezing, GradientClipping, Schedule
from workloads.training.techniques.precision import Autocast

pytestmark = pytest.mark.slow  # each compares training jobs

#: Losses in fp32 differ by the order of sums only.
SAME = {"rel": 1e-5}


@pytest.fixture(scope="module")
def baseline() -> Result:
    return trained(learning_rate=1e-2)


@pytest.fixture(scope="module")
def full() -> Result:
    return trained(method="full", learning_rate=1e-3)


PACKED: dict[str, Any] = {"padding": "packing"}
APART: dict[str, Any] = PACKED | {"packed_attention": "apart", "logits": "chunked"}


@pytest.mark.parametrize(
    "technique",
    [
        {"gradient_accumulation": 4, "gradient_checkpointing": True, "attention": "eager"},
        {"padding": "fixed"},
        PACKED,
        {"logits": "learned"},
        APART,
        PACKED | {"logits": "learned", "gradient_accumulation": 2},
    ],
    ids=lambda technique: "-".join(map(str, technique.values())),
)
def test_the_loss_curve_is_that_of_the_plain_job(technique, baseline) -> None:
    changed = trained(learning_rate=1e-2, **technique)
    assert losses(changed) == pytest.approx(losses(baseline), **SAME)
    assert [s.input_tokens for s in changed.samples] == [s.input_tokens for s in baseline.samples]


def test_paddings_differ_in_what_they_waste(baseline: Result) -> None:

    def computed(result: Result) -> int:
        return sum(sample.computed_tokens for sample in result.samples)

    fixed, packed, flat = (
        trained(learning_rate=1e-2, **how) for how in ({"padding": "fixed"}, PACKED, APART)
    )
    assert all(s.computed_tokens == 4 * 160 for s in fixed.samples)
    assert computed(packed) <= computed(baseline) < computed(fixed)
    assert all(s.computed_tokens == s.input_tokens for s in flat.samples)


def test_freezing_trains_the_upper_part_only(full: Any) -> None:
    frozen: Any = trained(
        method="full", learning_rate=1e-3, freeze_embeddings=True, freeze_layers=3
    )
    assert frozen.trainable_parameter_count < 0.5 * full.trainable_parameter_count
    assert frozen.train_flops_per_token < 0.8 * full.train_flops_per_token
    state = "optimizer_state_bytes"
    assert int(frozen.details[state]) < 0.5 * int(full.details[state])
    assert losses(frozen)[0] == pytest.approx(losses(full)[0], **SAME)
    assert losses(frozen)[-1] < losses(frozen)[0]
    model = small_model("llama")
    training = training_of(model, "SGD", 0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Freezing(freeze_embeddings=True, freeze_layers=1).on_model(training)
    _one_step(training)
    changed = {n for n, t in model.state_dict().items() if not t.equal(before[n])}
    assert not any("embed_tokens" in name or "layers.0." in name for name in changed)
    assert any("layers.1." in name for name in changed)
    assert training.details["frozen_embeddings"] == "1 embed_tokens"


def test_frozen_position_biases_stand_in_the_row() -> None:
    """T5's are an embedding too: of the first layer of each half, shared by the others."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, num_layers=2))
    training = training_of(model, "SGD", 0.1)
    Freezing(freeze_embeddings=True).on_model(training)
    assert "2 relative_attention_bias" in training.details["frozen_embeddings"]
    learns = {n for n, p in training.model.named_parameters() if p.requires_grad}
    assert learns and not any("relative_attention_bias" in name for name in learns)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-8bit", "adafactor"])
def test_optimizers_learn_the_same_thing(optimizer: str, full: Result) -> None:
    result = trained(method="full", learning_rate=1e-3, optimizer=optimizer)
    if optimizer == "adafactor":  # another rule: it learns, at its own pace
        assert losses(result)[-1] < losses(result)[0]
    else:
        assert losses(result) == pytest.approx(losses(full), rel=5e-3)
    if "8bit" in optimizer:
        state = "optimizer_state_bytes"
        assert int(result.details[state]) < int(full.details[state]) / 2


def test_loss_scaling_leaves_the_update_as_it_is() -> None:
    plain, scaled = (training_of(small_model("llama"), "SGD", 0.1) for _ in range(2))
    Autocast(autocast="fp16").on_optimizer(scaled)
    for training in (plain, scaled):
        _one_step(training)
    for one, other in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    before = [parameter.clone() for parameter in scaled.model.parameters()]
    scaled.backward(scaled.model.lm_head.weight.sum() * float("inf"))
    scaled.update()
    assert all(a.equal(b) for a, b in zip(before, scaled.model.parameters(), strict=True))
    first = torch.amp.GradScaler("cpu").get_scale()  # halved by the step that was left out
    assert scaled.metrics == {"skipped_steps": 1, "loss_scale": first / 2}


def test_packed_samples_do_not_meet_or_the_job_refuses() -> None:
    for kind in ("glm", "llama", "qwen2", "gpt2"):
        data.check_packing(small_model(kind), device_for("cpu"))
    with pytest.raises(Unsupported, match="lets packed samples attend to each other"):
        data.check_packing(small_model("bloom"), device_for("cpu"))


def test_samples_that_meet_where_two_rows_are_packed_are_seen(monkeypatch) -> None:
    """As under flash_attention_2 in transformers, which looks for samples in a single row."""
    model = small_model("llama")
    forward = model.forward

    def of_one_row(input_ids: Any, position_ids: Any, **more: Any) -> Any:
        return forward(
            input_ids, position_ids=position_ids if len(input_ids) == 1 else None, **more
        )

    monkeypatch.setattr(model, "forward", of_one_row)
    with pytest.raises(Unsupported, match="lets packed samples attend to each other"):
        data.check_packing(model, device_for("cpu"))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        *((kind, ("q_proj", "k_proj", "v_proj")) for kind in ("glm", "llama", "qwen2", "opt")),
        *((kind, ("query_key_value",)) for kind in ("gpt_neox", "bloom")),
        ("gpt2", ("c_attn",)),
        ("phi3", ("qkv_proj",)),
    ],
)
def test_default_targets_suit_every_architecture(kind: str, targets: tuple[str, ...]) -> None:
    applied = methods.apply(small_model(kind), method_of(parameters()), "fp32", "cpu")
    assert applied.adapter == f"rank 8, alpha 16 on {', '.join(targets)}"
    adapted = {n.split(".lora_A")[0] for n, p in applied.model.named_parameters() if "lora_A" in n}
    assert len(adapted) == 2 * len(targets)
    training = training_of(applied.model, "SGD", 0.1)
    assert all("lora" in n for n, p in applied.model.named_parameters() if p.requires_grad)
    _one_step(training)
    ups = [p for n, p in applied.model.named_parameters() if "lora_B" in n]
    assert any(bool(up.any()) for up in ups)


SAMPLES = st.lists(
    st.builds(
        lambda ids, prompt: TrainingSample(tuple(ids), min(prompt, len(ids))),
        st.lists(st.integers(3, 99), min_size=1, max_size=20),
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=12,
)


@given(samples=SAMPLES, capacity=st.integers(20, 60))
def test_packing_keeps_every_sample_whole(samples: list[TrainingSample], capacity: int) -> None:
    form: Any = SimpleNamespace(pad_token_id=0, max_length=capacity)
    packed = data.pack(samples, form)
    assert packed.attention_mask is None and packed.position_ids is not None
    assert packed.input_ids.shape[1] <= capacity
    found = []
    tensors = (packed.input_ids, packed.labels, packed.position_ids)
    for ids, labels, positions in zip(*(one.tolist() for one in tensors), strict=True):
        starts = [n for n, position in enumerate(positions) if position == 0] + [len(ids)]
        for start, end in pairwise(starts):
            assert positions[start:end] == list(range(end - start))
            found.append((ids[start:end], labels[start:end]))
    filling = [part for part in found if set(part[0]) == {0}]
    assert all(set(labels) == {NOT_LEARNED} for _, labels in filling)
    real = sorted(part for part in found if part not in filling)
    assert real == sorted((list(s.ids), s.labels) for s in samples)


@given(
    learned=st.lists(st.booleans(), min_size=2, max_size=300),
    scale=st.floats(0.1, 1e4),
    biased=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_loss_in_chunks_is_that_of_all_logits(learned, scale, biased, seed) -> None:
    torch.manual_seed(seed)
    head = torch.nn.Linear(6, 11, bias=biased)
    states = torch.randn(1, len(learned), 6, requires_grad=True)
    labels = torch.randint(11, (1, len(learned))).where(torch.tensor(learned), NOT_LEARNED)
    inputs = [states, *head.parameters()]
    whole = next_token_loss(head(states), labels)
    chunked = ChunkedLoss(head)(states, labels)
    torch.testing.assert_close(chunked, whole)
    gradients = [torch.autograd.grad(loss * scale, inputs) for loss in (chunked, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * scale)


@given(st.lists(st.integers(1, 200), min_size=1), st.integers(1, 8), st.integers(2, 50))
def test_batches_cover_the_data_and_like_lengths_meet(lengths, batch, window) -> None:
    samples = [TrainingSample((5,) * length, 1) for length in lengths]
    longest = []
    for batches in (data.in_order(samples, batch), data.uniform_length(samples, batch, window)):
        assert all(len(one) == batch for one in batches)
        assert {index for one in batches for index in one} == set(range(len(samples)))
        longest.append(sum(max(lengths[index] for index in one) for one in batches))
    assert len(samples) % batch or longest[1] <= longest[0]


@given(prompt=st.integers(1, 40), answer=st.integers(1, 40), longest=st.integers(8, 50))
def test_cutting_leaves_both_parts(prompt: int, answer: int, longest: int) -> None:
    kept, learned = cut(range(prompt), range(answer), longest)
    assert len(kept) >= 1 and len(learned) >= 1
    if prompt + answer <= longest:
        assert (len(kept), len(learned)) == (prompt, answer)
    else:
        assert len(kept) + len(learned) == longest
        assert len(learned) >= min(answer, longest // 2)


def _one_step(training: Any) -> None:
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    training.backward(training.model(input_ids=ids, labels=ids).loss)
    training.update()


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6),
    st.floats(0.125, 10, width=32),
    st.booleans(),
)
def test_gradients_together_are_no_longer_than_the_limit(slopes, limit, scaled) -> None:
    """Their direction stays, and shorter ones stay as they are; so with loss scaling, where the
    scaler hands gradients over only once they are what they are."""
    net = torch.nn.Linear(len(slopes), 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    one = training_of(net, "SGD", 1.0)
    GradientClipping(max_gradient_norm=limit).on_model(one)
    if scaled:
        Autocast(autocast="fp16").on_optimizer(one)
    one.backward((net.weight * torch.tensor([slopes])).sum())
    one.update()
    wanted = torch.tensor([slopes])
    wanted = wanted * min(1.0, limit / max(float(wanted.norm()), 1e-12))
    assert torch.allclose(-net.weight.detach(), wanted, rtol=1e-3, atol=1e-5)


@given(st.integers(1, 50), st.integers(1, 60), st.floats(1e-6, 1.0), st.booleans())
def test_the_linear_schedule_is_the_trainers(steps, whole, rate, longer) -> None:
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, whole)
    ours: Any = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"lr": rate}]),
        learning_rate=rate,
        steps=9 if longer else whole,
    )
    technique = Schedule(learning_rate_schedule="linear", schedule_steps=whole if longer else None)
    for step in range(steps):
        assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(scheduler.get_last_lr()[0])
        technique.after_step(ours, step)
        optimizer.step()
        scheduler.step()
