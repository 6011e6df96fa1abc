"""Sparsity and weight sharing: masks that hold, channels that go, codes that read back."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetuning_cases import asked, refuse, train, trained
from generation_cases import Worker
from generation_cases import request as generation
from hypothesis import given
from hypothesis import strategies as st

from workloads import text_generation
from workloads.base import BadConfiguration, Result
from workloads.compression import dictionary, pruning, sharing
from workloads.devices import device_for
from workloads.engines.transformers import generation as engine
from workloads.models.loading import load_causal_model, open_model
from workloads.models.products import product_root
from workloads.registry import find_workload

PLAIN: dict[str, Any] = {
    "method": "full",
    "samples": 4,
    "max_length": 64,
    "held_out": 4,
    "learning_rate": 1e-3,
}

pytestmark = pytest.mark.usefixtures("shared")


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 0.99), st.integers(0, 9))
def test_magnitude_counts_to_the_weight_and_takes_the_smallest(rows, columns, share, seed) -> None:
    torch.manual_seed(seed)
    weight = torch.randint(-3, 4, (rows, columns)).float()
    mask = pruning.magnitude_mask(weight, share)
    assert int((~mask).sum()) == round(share * rows * columns)
    if mask.any() and not mask.all():
        assert weight[~mask].abs().max() <= weight[mask].abs().min()


def test_sparse_kernels_take_what_is_two_of_four_and_nothing_else() -> None:
    weight = torch.randn(8, 16)
    assert not engine.is_two_of_four(weight)
    assert engine.is_two_of_four(weight * pruning.two_of_four_mask(weight))
    with pytest.raises(BadConfiguration, match=r"q_proj has more than two values.*sparsity: 2:4"):
        engine.use_kernels(load_causal_model(open_model("tiny-chatglm3")))
    spec = find_workload("text-generation")
    parameters = spec.validate({"sparse_kernels": True}, "transformers")
    for device, refused_there in (("cpu", True), ("cuda", False), ("hpu", True)):
        job = replace(asked(device=device), parameters=parameters)
        found = [one for one in refuse(job, "text-generation") if one.setting == "sparse_kernels"]
        assert bool(found) is refused_there and all(one.unsupported for one in found)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3000), st.integers(0, 3))
def test_a_code_reads_back_and_is_within_a_bit_of_the_entropy(seen: list[int], skew: int) -> None:
    symbols = np.array(seen + [seen[0]] * 700 * skew, np.int32)
    coded = sharing.encode(symbols, 41)
    np.testing.assert_array_equal(sharing.decode(coded), symbols)
    counts = np.bincount(symbols)
    bits = float((coded.lengths[: counts.size] * counts).sum()) / symbols.size
    assert sharing.entropy_bits(counts) <= bits + 1e-9
    assert bits <= sharing.entropy_bits(counts) + 1
    assert len(coded.data) == -(-round(bits * symbols.size) // 8)
    used = coded.lengths[coded.lengths > 0].astype(float)
    assert (2.0**-used).sum() == (1 if used.size > 1 else 0.5)  # Kraft: complete


def test_shared_values_are_means_of_their_weights_and_zeros_stay() -> None:
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    weights[:, :20] = 0
    symbols, values = sharing.share(weights, 3)
    assert values.size == 9
    flat = weights.ravel()
    np.testing.assert_array_equal(symbols == 0, flat == 0)
    for symbol in range(1, 9):
        assert flat[symbols == symbol].mean() == pytest.approx(values[symbol], abs=1e-2)
    held = flat[flat != 0]
    near = np.abs(held[:, None] - values[None, 1:]).argmin(1) + 1
    assert (near == symbols[flat != 0]).mean() > 0.99


def test_shared_values_learn_by_the_gradients_of_their_weights() -> None:
    """Beside autograd over the values themselves: weights = values[numbers], zeros fixed."""
    torch.manual_seed(0)
    layer, given = torch.nn.Linear(24, 16), torch.randn(32, 24)
    with torch.no_grad():
        layer.weight[torch.rand(16, 24) < 0.5] = 0
    shared = sharing.SharedLayers({"one": layer}, 2)
    plain = layer.weight.detach().clone()
    unique, numbers = plain.unique(return_inverse=True)
    assert len(unique) == 5
    values = unique.clone().requires_grad_()
    optimizers = [
        torch.optim.AdamW([weight], lr=0.05, weight_decay=0.01) for weight in (layer.weight, values)
    ]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (layer(given) - 1).square().mean().backward()
        shared.sum_gradients()
        fixed = torch.where(unique == 0, 0.0, values)
        product = torch.nn.functional.linear(given, fixed[numbers], layer.bias)
        (product - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        shared.tie()
        learned = torch.where(unique == 0, 0.0, values.detach())[numbers]
        torch.testing.assert_close(layer.weight.detach(), learned)
    assert not torch.equal(layer.weight, plain)


def test_linear_and_convolution_layers_come_back_from_the_file_of_a_dictionary() -> None:
    torch.manual_seed(4)
    model = torch.nn.ModuleDict(
        {
            "wide": torch.nn.Linear(64, 96),
            "small": torch.nn.Linear(32, 48).bfloat16(),
            "convolution": torch.nn.Conv2d(16, 24, 3),
        }
    )
    model["small"].weight.data.mul_(1e-3)  # counts as much as the others
    model.get_output_embeddings = lambda: None
    layers = pruning.prunable_layers(model, torch.nn.Linear, torch.nn.Conv2d)
    before = {name: layer.weight.float().clone() for name, layer in layers.items()}
    data = dictionary.code(layers, 64, 4, 16)
    error = dictionary.replace_weights(model, data)
    lost = whole = 0.0
    for name, (atoms, places, values) in dictionary.read_codes(data).items():
        weight = model[name].weight.detach()
        rows = zip(places.tolist(), values.double().numpy(), strict=True)
        sums = [value @ atoms.double().numpy()[place] for place, value in rows]
        opened = torch.tensor(np.array(sums)).float().view(weight.shape).to(weight)
        torch.testing.assert_close(opened, weight, rtol=1e-2, atol=1e-6)
        change = float((weight - before[name]).norm() / before[name].norm())
        assert change < 0.45, (name, change)
        lost += float((weight - before[name]).square().sum())
        whole += float(before[name].square().sum())
    assert error == pytest.approx((lost / whole) ** 0.5, rel=1e-4)
    dense = copy.deepcopy(model)
    assert dictionary.use_products(model, data) == 2
    for name, inputs in (("wide", torch.randn(2, 5, 64)), ("small", torch.randn(3, 32).bfloat16())):
        torch.testing.assert_close(model[name](inputs), dense[name](inputs), rtol=2e-2, atol=1e-5)
    for wrong in (b"", data[1:], data[:-1], data[:60]):
        with pytest.raises(BadConfiguration, match="no file of layers by a dictionary"):
            dictionary.read_codes(wrong)


def _layers(name: str) -> dict[str, torch.nn.Linear]:
    return pruning.prunable_layers(load_causal_model(open_model(name), dtype=torch.float32))


@pytest.fixture(scope="module")
def half(shared: Path) -> Result:
    """A job that has saved the model "half"."""
    return train(**PLAIN, steps=2, sparsity="2:4", save_model="half")


@pytest.mark.slow
def test_masks_outlast_the_optimizer_and_the_saved_model_has_them(half: Result) -> None:
    """Momentum would bring weights back."""
    for name, layer in _layers("half").items():
        groups = (layer.weight == 0).view(layer.out_features, -1, 4).sum(2)
        assert (groups >= 2).all(), name
    metrics = half.metrics
    assert metrics["zero_share"] == pytest.approx(0.5, abs=1e-3)
    # fp32: two values and four bits where there were four values
    assert metrics["layer_bytes_after"] / metrics["layer_bytes_before"] == pytest.approx(68 / 128)
    assert metrics["pruned_loss"] != metrics["dense_loss"]
    assert metrics["held_out_loss"] != metrics["pruned_loss"]
    assert "dense arithmetic" in half.details["sparsity"]
    made = Worker().run("advertisegen-synthetic", model="half", prompts=1, output_tokens=2)
    assert made.details["sparsity"] == half.details["sparsity"]


@pytest.mark.slow
@pytest.mark.usefixtures("half")
def test_a_row_on_sparse_kernels_has_the_bytes_that_are_left(monkeypatch) -> None:
    """torch compresses on CUDA cards alone; the format itself needs none."""
    conversion = pytest.importorskip("torch.sparse._semi_structured_conversions")

    def compressed(weight: torch.Tensor) -> torch.Tensor:
        packed, meta = conversion.sparse_semi_structured_from_dense_cutlass(weight)
        left_out = dict.fromkeys(("packed_t", "meta_t", "compressed_swizzled_bitmask"))
        made: torch.Tensor = torch.sparse.SparseSemiStructuredTensorCUTLASS(
            weight.shape, packed=packed, meta=meta, **left_out
        )
        return made

    job = generation("advertisegen-synthetic", model="half", precision="bf16")
    dense = engine.load(job, device_for("cpu"))
    took = sum(
        layer.weight.numel() * 2
        for layer in pruning.prunable_layers(dense.model).values()
        if not (layer.out_features % 32 or layer.in_features % 64)
    )
    assert took
    monkeypatch.setattr("torch.sparse.to_sparse_semi_structured", compressed)
    job = replace(job, settings={**job.settings, "sparse_kernels": True})
    found = engine.load(job, device_for("cpu"))
    assert dense.weights.weight_bytes - found.weights.weight_bytes == took * 7 // 16
    assert found.details["sparsity"] == dense.details["sparsity"]
    assert "sparse kernels in" in found.details["sparse_kernels"]


def test_the_optimizers_averages_are_masked_too() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    mask = pruning.two_of_four_mask(layer.weight)
    pruned = pruning.Pruned(masks={layer.weight: mask})
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    pruned.mask_averages(optimizer)
    (average,) = [value["momentum_buffer"] for value in optimizer.state.values()]
    assert torch.equal(average, mask.float())


@pytest.mark.slow
def test_prune_share_and_code(small_model: str) -> None:
    gradual = {"sparsity": "magnitude", "sparsity_share": 0.6, "sparsity_schedule": "gradual"}
    shared = {"cluster_bits": 3, "cluster_steps": 1, "save_model": "coded"}
    result = train(**PLAIN, **gradual, **shared, model=small_model, steps=4)
    metrics = result.metrics
    assert metrics["zero_share"] == pytest.approx(0.6, abs=1e-3)
    file = product_root("model") / "coded" / sharing.CODED_FILE
    assert file.stat().st_size == metrics["layer_bytes_after"]
    opened = sharing.read_layers(data := file.read_bytes())
    for wrong in (b"", data[1:], data[:-1], data[:60]):
        with pytest.raises(BadConfiguration, match="no file of coded layers"):
            sharing.read_layers(wrong)
    for name, layer in _layers("coded").items():
        assert len(layer.weight.unique()) <= 9, name
        assert torch.equal(torch.from_numpy(opened[name]), layer.weight), name
    assert metrics["entropy_bits"] <= metrics["coded_bits"] <= metrics["entropy_bits"] + 1
    ratio = metrics["layer_bytes_after"] / metrics["layer_bytes_before"]
    assert metrics["coded_bits"] / 32 < ratio < metrics["coded_bits"] / 32 * 1.1
    assert {"dense_loss", "unshared_loss", "held_out_loss"} <= metrics.keys()
    assert "pruned_loss" not in metrics, "gradual pruning has no moment before learning"


@pytest.mark.slow
def test_a_dictionary_of_kernels_and_products_by_it(small_model: str) -> None:
    """The saved model writes the same tokens through the dictionary as through its matrices."""
    made = {"dictionary_atoms": 64, "dictionary_terms": 3, "dictionary_length": 8}
    result = train(**PLAIN, **made, model=small_model, steps=1, save_model="atoms")
    metrics, layers = result.metrics, _layers("atoms")
    file = product_root("model") / "atoms" / dictionary.DICTIONARY_FILE
    assert file.stat().st_size == metrics["layer_bytes_after"] < 0.4 * metrics["layer_bytes_before"]
    assert 0 < metrics["dictionary_error"] < 0.6
    assert {"dense_loss", "unshared_loss", "held_out_loss"} <= metrics.keys()
    codes = dictionary.read_codes(file.read_bytes())
    assert codes.keys() == layers.keys()
    for name, layer in layers.items():
        assert torch.equal(dictionary.expand(codes[name], layer.weight.shape), layer.weight), name
    job = generation("advertisegen-synthetic", model="atoms", prompts=2, output_tokens=8)
    dense = text_generation.run(job, Worker().context())
    job = replace(job, settings=job.settings | {"dictionary_products": True})
    quick = text_generation.run(job, Worker().context())
    assert quick.details["dictionary_products"] == f"{len(layers)} layers by sums of atoms"
    assert [one.output_text for one in quick.items] == [one.output_text for one in dense.items]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["once", "gradual"])
def test_removed_channels_leave_a_smaller_dense_model(schedule: str) -> None:
    """It loads like any model, has fewer operations, and does what the pruned one did: its loss is
    the same with channels masked as with channels gone. Its checkpoint is read back before any
    channel goes."""
    whole = pruning.feed_forwards(load_causal_model(open_model("tiny-chatglm3")))[0].channels
    job = {"sparsity": "channels", "sparsity_share": 0.25, "sparsity_schedule": schedule}
    result = train(**PLAIN, **job, steps=2, save_model=f"narrow-{schedule}", save_every=2)
    assert result.details["checkpoint_read"].startswith("step 1, ")
    model = load_causal_model(open_model(f"narrow-{schedule}"), dtype=torch.float32)
    left = round(whole * 0.75 / 8) * 8
    assert model.config.intermediate_size == left
    assert {part.channels for part in pruning.feed_forwards(model)} == {left}
    metrics = result.metrics
    assert metrics["layer_bytes_after"] == sum(
        layer.weight.numel() * 4 for layer in pruning.prunable_layers(model).values()
    )
    assert metrics["layer_bytes_after"] < metrics["layer_bytes_before"]
    if schedule == "once":
        dense = trained(**PLAIN, steps=2)
        assert result.train_flops_per_token < dense.train_flops_per_token


def test_channels_that_are_gone_are_those_that_a_mask_would_zero() -> None:
    """A fused matrix has two parts, and rows of both go."""
    source = open_model("tiny-chatglm3")
    masked = load_causal_model(source, dtype=torch.float32).eval()
    smaller = load_causal_model(source, dtype=torch.float32).eval()
    for part in pruning.feed_forwards(masked):
        for layer, mask in list(part.masks(40)):
            layer.weight.data.mul_(mask)
    pruning.remove_channels(smaller, 40)
    ids = torch.tensor([[5, 9, 77, 12, 300, 41, 8, 9]])
    with torch.no_grad():
        torch.testing.assert_close(
            smaller(input_ids=ids).logits, masked(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )


def test_two_of_four_names_the_layer_that_it_does_not_divide(monkeypatch) -> None:
    monkeypatch.setattr(
        "workloads.models.rules.linear_shapes", lambda model: {"layers.3.wide": (8, 30)}
    )
    (refusal,) = refuse(asked(method="full", sparsity="2:4"))
    assert "the 30 inputs of layers.3.wide" in refusal.reason and refusal.hint
