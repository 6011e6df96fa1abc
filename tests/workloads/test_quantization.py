"""Quantization as a step: fewer bits, quality before and after, models that other jobs run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_cases import asked, refuse
from generation_cases import ONCE, Worker
from transformers import LlamaConfig, LlamaForCausalLM

from workloads import quantization
from workloads.base import BadConfiguration, JobContext, Refusal, Request, Result, Unsupported
from workloads.compression import calibration
from workloads.data.datasets import load_dataset
from workloads.devices import device_for
from workloads.inspection.checkpoints import PROTECTED
from workloads.models.loading import load_causal_model, load_tokenizer, open_model
from workloads.registry import find_workload

SMALL: dict[str, Any] = {"samples": 4, "length": 32, "held_out": 4}
LEARNED: dict[str, Any] = {"method": "auto-round", "numbers": "int4"}


pytestmark = pytest.mark.usefixtures("shared")


def quantize(
    model: str = "tiny-chatglm3",
    context: JobContext | None = None,
    precision: str = "bf16",
    **given: Any,
) -> Result:
    spec = find_workload("quantization")
    job = Request(
        workload="quantization",
        model=model,
        dataset="advertisegen-synthetic",
        precision=precision,
        batch_size=4,
        engine="transformers",
        measure=ONCE,
        residency_key="quantization",
        parameters=spec.validate({**SMALL, **given}),
    )
    return quantization.run(job, context or Worker().context())


def refused(**given: Any) -> tuple[Refusal, ...]:
    names = ("model", "precision", "cards", "batch_size", "device")
    fields = {name: given.pop(name) for name in names if name in given}
    parameters = find_workload("quantization").validate(given)
    return refuse(replace(asked(**fields), parameters=parameters), "quantization")


@pytest.mark.slow
def test_reading_the_held_out_examples_is_in_no_time_of_the_row(monkeypatch) -> None:
    clock = [0.0]
    read = quantization.read

    def slow_read(*given: Any) -> Any:
        clock[0] += 100.0
        return read(*given)

    monkeypatch.setattr(quantization, "read", slow_read)
    context = replace(Worker().context(), clock=lambda: clock[0], cpu_clock=lambda: clock[0])
    result = quantize(context=context)
    assert clock == [200.0], "once before and once after"
    assert result.load_s == 0.0
    assert [(s.wall_s, s.cpu_s) for s in result.samples] == [(0.0, 0.0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "numbers", "precision", "share"),
    [
        ("weight-only", "int8", "int8", 0.7),
        ("static", "int8", "int8", 0.7),
        ("weight-only", "fp8", "fp8", 0.7),
        ("weight-only", "int4", "int4", 0.75),
        ("weight-only", "nf4", "int4", 0.5),
    ],
)
def test_a_model_in_fewer_bits_is_kept_and_runs(method, numbers, precision, share) -> None:
    name = f"{method}-{numbers}"
    result = quantize(method=method, numbers=numbers, save_model=name)
    metrics = result.metrics
    assert metrics["model_bytes_after"] < metrics["model_bytes_before"]
    linear = sum(
        p.numel() * 2
        for name, p in load_causal_model(open_model("tiny-chatglm3")).named_parameters()
        if "proj" in name and p.dim() == 2
    )
    saved = metrics["model_bytes_before"] - metrics["model_bytes_after"]
    assert saved > linear * (1 - share), "linear layers shrink by what their numbers say"
    assert 0.5 < metrics["token_agreement"] <= 1
    read = (4, 4 * 32) if method == "static" else (0, 0)
    assert [(s.items, s.input_tokens) for s in result.samples] == [read]
    assert metrics["held_out_loss"] == pytest.approx(metrics["held_out_loss_before"], rel=0.2)
    small = {"prompts": 1, "output_tokens": 2}
    made = Worker().run("advertisegen-synthetic", model=name, precision=precision, **small)
    # bitsandbytes holds the scales of a layer in other tensors once they came from a file
    assert made.weight_bytes == pytest.approx(metrics["model_bytes_after"], rel=0.02)
    assert f"{method}, {numbers}" in made.precision_detail


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "precision"), [("int4", "int4"), ("fp8", "fp8")])
def test_a_model_quantised_from_fp32_runs_in_16_bits(numbers, precision) -> None:
    """torchao's weights remember float32; the consumer computes in bfloat16."""
    name = f"from-fp32-{numbers}"
    quantize(numbers=numbers, precision="fp32", save_model=name)
    whole, half = (
        load_causal_model(open_model(name), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    wide, narrow = (m.model.layers[0].mlp.down_proj for m in (whole, half))
    given = torch.linspace(-1, 1, wide.in_features)[None]
    plain = given @ wide.weight.dequantize().float().t()
    with torch.no_grad():
        torch.testing.assert_close(narrow(given.bfloat16()).float(), plain, rtol=0.02, atol=0.02)
    small = {"prompts": 1, "output_tokens": 2}
    made = Worker().run("advertisegen-synthetic", model=name, precision=precision, **small)
    assert "16 bits" in made.precision_detail


@pytest.mark.slow
def test_static_activations_are_in_int8_in_the_ranges_of_the_texts() -> None:
    """By hand for one layer; what lies outside of the texts' range is cut off."""
    quantize(method="static", save_model="static")
    model = load_causal_model(open_model("static"), dtype=torch.bfloat16)
    layers = [m for m in model.modules() if hasattr(getattr(m, "weight", None), "act_quant_scale")]
    assert len(layers) == 4 * 6, "all but the output layer"
    layer = layers[0]
    scale = layer.weight.act_quant_scale
    given = torch.linspace(-200, 200, layer.in_features)[None, None] * scale
    whole = (given / scale).round().clamp(-127, 127)
    assert whole.unique().numel() < given.unique().numel(), "some lie outside"
    products = whole[0] @ layer.weight.qdata.float().t()
    by_hand = products * scale.flatten() * layer.weight.scale.flatten() + layer.bias.float()
    with torch.no_grad():
        made = layer(given.bfloat16()).float()
    torch.testing.assert_close(made[0], by_hand, rtol=0.03, atol=0.03)


@pytest.mark.slow
def test_a_quantised_model_is_not_quantised_again_nor_run_as_something_else() -> None:
    quantize(save_model="once")
    assert any("quantised already" in one.reason for one in refused(model="once"))
    with pytest.raises(BadConfiguration, match="once is quantised already"):
        quantize(model="once")
    with pytest.raises(BadConfiguration, match="int8"):
        Worker().run("advertisegen-synthetic", model="once", precision="bf16", prompts=1)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "numbers"), [("weight-only", "int4"), ("static", "int8")])
def test_corrections_bring_means_and_variances_back(method: str, numbers: str) -> None:
    """Through the quantised path: a static layer rounds its inputs too. The means are taken here
    by a loop of plain torch."""
    text = {"samples": 4, "length": 32}
    name = f"corrected-{numbers}"
    both = {"bias_correction": True, "variance_correction": True}
    given = {"method": method, "numbers": numbers, "precision": "fp32", "save_model": name}
    result = quantize(**given, **text, **both)
    metrics = result.metrics
    assert metrics["mean_error"] < 0.8 * metrics["mean_error_before"]
    assert metrics["corrected_layers"] == 4 * 3 and metrics["scaled_layers"] == 4 * 6
    source = open_model("tiny-chatglm3")
    examples = load_dataset("advertisegen-synthetic").examples
    texts = quantization.calibration_texts(examples, load_tokenizer(source), 4, 32)
    plain, made = (
        _outputs(load_causal_model(open_model(one), dtype=torch.float32).eval(), texts)
        for one in ("tiny-chatglm3", name)
    )
    biased = [name for name in plain if name.endswith(("q_proj", "k_proj", "v_proj"))]
    for layer in biased:
        goal = plain[layer].mean(0)
        torch.testing.assert_close(made[layer].mean(0), goal, rtol=0.02, atol=2e-3)
    varied = torch.cat([(made[n].std(0) / plain[n].std(0) - 1).abs() for n in plain])
    assert float(varied.median()) < 0.01


def _outputs(model: Any, texts: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, layer in model.model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(
                lambda _, __, out, name=name: found.__setitem__(name, out.flatten(0, -2).float())
            )
    with torch.no_grad():
        model(input_ids=torch.tensor(texts), use_cache=False)
    return found


def test_layers_get_a_bias_where_the_configuration_has_a_switch() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        assert calibration.add_biases(model) == 2 * 7
        assert model.config.attention_bias and model.config.mlp_bias
        assert torch.equal(model(input_ids=ids).logits, plain)
    assert calibration.add_biases(model) == 0
    again = LlamaForCausalLM(model.config)
    again.load_state_dict(model.state_dict())  # so files hold them


def test_a_small_dataset_and_a_layer_that_no_text_reaches_are_no_obstacle() -> None:
    """Texts that nothing reads are not asked for; a mixture's expert may see none."""
    assert not refused(samples=100_000, length=4096)

    class Mixture(torch.nn.Module):
        base_model_prefix = ""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = torch.nn.Linear(1, 2), torch.nn.Linear(1, 2)

        def get_output_embeddings(self) -> None:
            return None

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return self.used(input_ids[..., None].float())

    model, device = Mixture(), device_for("cpu")
    moments = calibration.output_moments(model, [[1, 2]], device)
    assert moments.keys() == {"used"}
    assert calibration.correct_outputs(model, moments, [[1, 2]], device) == (1, 0)


def test_a_method_whose_package_is_missing_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "auto_round", None)
    with pytest.raises(Unsupported, match="pip install auto-round"):
        quantize(method="auto-round", numbers="int4")


@pytest.mark.parametrize(
    ("given", "setting", "reason"),
    [
        ({"method": "auto-round"}, "numbers", "stores int4"),
        ({"method": "static", "numbers": "fp8"}, "numbers", "static stores int8, not fp8"),
        ({"iters": 3}, "iters", "learns nothing"),
        (LEARNED | {"bias_correction": True}, "bias_correction", "would not be in it"),
        (LEARNED | {"model": "random:tiny-chatglm3"}, "model", "no weights to read back"),
        (LEARNED | {"model": "sealed"}, "model", "sealed is protected, and auto-round writes"),
        ({"group_size": 32}, "group_size", "no groups"),
        ({"numbers": "int4", "group_size": 40}, "group_size", "groups of 40 do not divide the"),
        ({"held_out": 9999}, "held_out", "none would be left"),
        ({"save_model": "tiny-t5"}, "save_model", "embedded model"),
        ({"device": "hpu"}, "numbers", "no kernels for"),
        ({"samples": 10**6, "bias_correction": True}, "samples", "tokens, and what"),
        ({"precision": "int8"}, "precision", "is quantised"),
        ({"cards": 2}, "cards", "one card"),
        ({"batch_size": "max"}, "batch_size", "nothing is searched"),
    ],
)
def test_what_cannot_be_quantised_is_refused(given, setting, reason, shared) -> None:
    if given.get("model") == "sealed" and not (shared / "sealed").exists():
        (shared / "sealed").mkdir()
        config = Path(open_model("tiny-chatglm3").path, "config.json").read_bytes()
        (shared / "sealed/config.json").write_bytes(config)
        (shared / f"sealed/model.safetensors{PROTECTED}").touch()
    found = refused(**given)
    assert any(one.setting == setting and reason in one.reason and one.hint for one in found), found
