"""Precisions: the table is whole and true, and what is loaded is what was asked for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from generation_cases import PROMPTS, Worker, write_dataset

from workloads.base import BadConfiguration, Result, Unsupported
from workloads.models import precision
from workloads.models import precision as weights

needs_quant = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or importlib.util.find_spec("bitsandbytes") is None,
    reason="needs the extra 'quant'",
)
ON_CPU = [p for p in precision.PRECISIONS if precision.support(p, "cpu").supported]


@pytest.fixture(scope="module")
def results(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    dataset = write_dataset(tmp_path_factory.mktemp("data") / "prompts.json")
    return {
        name: worker.run(dataset, precision=name, batch_size=4, output_tokens=6, ignore_eos=True)
        for name in ON_CPU
    }


def linear_weights(worker: Worker, name: str) -> list[Any]:
    model = worker.loaded[f"tiny-chatglm3|{name}|transformers"].engine.model
    return [
        module.weight
        for path, module in model.named_modules()
        if "Linear" in type(module).__name__ and path != "lm_head"
    ]


def test_engines_say_what_they_do_otherwise() -> None:
    assert not precision.support("fp8", "hpu").supported
    assert "Neural Compressor" in precision.support("fp8", "hpu", "optimum-habana").means
    assert "no int8 kernels" in precision.support("int8", "hpu", "optimum-habana").reason
    assert "refuse fp16" in precision.support("fp16", "hpu", "optimum-habana").reason
    assert precision.support("bf16", "cpu", "vllm") == precision.support("bf16", "cpu")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        (row["precision"], row["device"])
        for row in precision.table()
        if not (row["supported"] or row["engine"])
    ],
)
def test_an_unsupported_precision_raises_with_the_tables_reason(name: str, device: str) -> None:
    with pytest.raises(Unsupported) as caught:
        precision.loading_arguments(name, device)
    assert precision.support(name, device).reason in str(caught.value)


@pytest.mark.parametrize(("name", "device"), [("fp64", "cpu"), ("fp32", "tpu")])
def test_unknown_names_are_refused_with_what_there_is(name: str, device: str) -> None:
    with pytest.raises(BadConfiguration, match="There is: "):
        precision.support(name, device)


@pytest.mark.parametrize(("name", "package"), [("int8", "torchao"), ("int4", "bitsandbytes")])
def test_a_missing_package_says_how_to_get_it(name, package, monkeypatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == package else real(n, *a)
    )
    with pytest.raises(Unsupported, match=rf"'{package}'.*pip install {package}"):
        precision.loading_arguments(name, "cpu")


@pytest.mark.slow
@needs_quant
@pytest.mark.parametrize("name", ON_CPU)
def test_every_precision_of_the_cpu_loads_and_generates(name, results) -> None:
    result = results[name]
    assert {item.output_tokens for item in result.items} == {6}
    assert len(result.items) == len(PROMPTS)
    assert precision.support(name, "cpu").means in result.precision_detail
    assert result.parameter_count == results["fp32"].parameter_count


@needs_quant
@pytest.mark.parametrize(
    ("name", "least", "most", "kind"),
    [
        ("fp32", 4.0, 4.0, "Linear"),
        ("fp16", 2.0, 2.0, "Linear"),
        ("bf16", 2.0, 2.0, "Linear"),
        ("fp8", 1.0, 1.05, "Linear"),
        ("int8", 1.0, 1.05, "Linear"),
        ("int4", 0.5, 0.57, "Linear4bit"),
    ],
)
def test_linear_weights_take_the_bytes_that_their_format_needs(
    name: str, least: float, most: float, kind: str, worker: Worker, results: dict[str, Result]
) -> None:
    found = linear_weights(worker, name)
    count = sum(weights.logical_count(weight) for weight in found)
    each = sum(weights.stored_bytes(weight) for weight in found) / count
    assert least <= each <= most
    model = worker.loaded[f"tiny-chatglm3|{name}|transformers"].engine.model
    assert type(model.model.layers[0].mlp.down_proj).__name__ == kind


@needs_quant
@pytest.mark.parametrize("asked", precision.PRECISIONS)
@pytest.mark.parametrize("loaded", ON_CPU)
def test_a_model_in_another_precision_than_asked_for_is_refused(asked, loaded, worker, results):
    model = worker.loaded[f"tiny-chatglm3|{loaded}|transformers"].engine.model
    if asked == loaded:
        weights.inspect(model, asked, "cpu")
    else:
        with pytest.raises(BadConfiguration, match=f"asked for in {asked}"):
            weights.inspect(model, asked, "cpu")


def test_one_layer_left_out_is_noticed(worker: Worker, results: dict[str, Result]) -> None:
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(9))).bfloat16()
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name != "4" and name != "")
    with pytest.raises(BadConfiguration, match=r"1 of its 9 linear layers.*4\.weight is bfloat16"):
        weights.inspect(model, "int8", "cpu")


def test_four_bit_weights_in_buffers_are_counted_and_a_plain_layer_is_noticed() -> None:
    """Checkpoints of GPTQ, AWQ and AutoRound: eight weights in an int32, zeros and scales."""
    import torch

    class PackedLinear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.zeros(64 // 8, 32, dtype=torch.int32))
            self.register_buffer("qzeros", torch.zeros(2, 32 // 8, dtype=torch.int32))
            self.register_buffer("scales", torch.zeros(2, 32, dtype=torch.bfloat16))

    model = torch.nn.Sequential(PackedLinear(), torch.nn.LayerNorm(32))
    found = weights.inspect(model, "int4", "hpu", "optimum-habana")
    assert found.parameter_count == 64 * 32 + 2 * 32
    assert found.weight_bytes == 64 * 32 // 2 + 2 * 32 // 2 + 2 * 32 * 2 + 2 * 32 * 4
    assert found.quantized_share == pytest.approx(64 * 32 / found.parameter_count)
    model[0].infeatures, model[0].outfeatures = 64, 32  # as some layers say
    assert weights.inspect(model, "int4", "hpu", "optimum-habana") == found
    model.append(torch.nn.Linear(32, 32, dtype=torch.bfloat16))
    with pytest.raises(BadConfiguration, match=r"1 of its 1 linear layers.*2\.weight is bfloat16"):
        weights.inspect(model, "int4", "hpu", "optimum-habana")
    with pytest.raises(BadConfiguration, match="asked for in fp8"):
        weights.inspect(model, "fp8", "hpu", "optimum-habana")
    # A look at parameters alone would miss what lies in buffers.
    with pytest.raises(BadConfiguration, match="1 of its layers are packed in 4 bits"):
        weights.inspect(model, "bf16", "cpu")


def test_sizes_that_the_int4_kernel_cannot_take_are_refused_before_loading(tmp_path) -> None:
    """bitsandbytes would fail inside the first product; the message names size and block."""
    from transformers import GlmConfig

    config = GlmConfig(hidden_size=128, intermediate_size=200)
    with pytest.raises(Unsupported, match="intermediate_size is 200"):
        weights.check_shapes(config, "int4", "cpu")
    weights.check_shapes(config, "int8", "cpu")
    weights.check_shapes(config, "int4", "cuda")
