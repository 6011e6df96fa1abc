"""Checkpoints that others have quantised: read here, or refused with what would read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_cases import asked, refuse
from generation_cases import Worker, request
from safetensors.torch import load_file, save_file

from workloads import text_generation
from workloads.base import Unsupported
from workloads.models.loading import load_causal_model, open_model
from workloads.models.rules import READERS, as_stored, method_of, reading_arguments, text_refusals
from workloads.registry import find_workload

Change = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


def checkpoint(to: Path, config: Mapping[str, Any], change: Change | None = None) -> str:
    if change is None:
        to.mkdir()
        (to / "model.safetensors").touch()
        found = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    else:
        shutil.copytree(open_model("tiny-chatglm3").path, to)
        stored = {}
        for name, tensor in load_file(to / "model.safetensors").items():
            inside = name.endswith("proj.weight")
            parts = change(tensor.float()) if inside else {"weight": tensor.bfloat16()}
            stem = name.removesuffix("weight") if inside else ""
            stored |= {stem + n if stem else name: part for n, part in parts.items()}
        save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
        found = json.loads((to / "config.json").read_text())
    text = json.dumps({**found, "quantization_config": dict(config)})
    (to / "config.json").write_text(text)
    return str(to)


def in_fp8(weight: torch.Tensor, block: int = 32) -> dict[str, torch.Tensor]:
    """A scale for each square of 32 × 32 weights."""
    rows, columns = weight.shape
    squares = weight.reshape(rows // block, block, columns // block, block)
    scale = squares.abs().amax((1, 3)) / 448
    numbers = (squares / scale[:, None, :, None]).reshape(rows, columns)
    return {"weight": numbers.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def in_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.bfloat16()}


def by_bitsandbytes(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same, with each output's largest value in place of its scale."""
    most = weight.abs().amax(1)
    return {"weight": (weight * 127 / most[:, None]).round().to(torch.int8), "SCB": most}


def packed(weight: torch.Tensor, group: int = 32) -> dict[str, torch.Tensor]:
    """4 bits as GPTQ has them: eight inputs of an output to a number, zero points one less."""
    outputs, inputs = weight.shape
    groups = weight.reshape(outputs, inputs // group, group)
    scale = groups.abs().amax(2) / 7
    numbers = (groups / scale[..., None]).round().clamp(-8, 7).reshape(outputs, inputs) + 8
    shifts = torch.arange(8, dtype=torch.int64) * 4

    def to_int32(values: torch.Tensor) -> torch.Tensor:
        words = (values.long().reshape(-1, 8) << shifts).sum(1)
        return torch.where(words >= 2**31, words - 2**32, words).int()

    zeros = torch.full((inputs // group, outputs), 7)
    return {
        "qweight": to_int32(numbers).reshape(outputs, inputs // 8).t().contiguous(),
        "qzeros": to_int32(zeros).reshape(inputs // group, outputs // 8),
        "scales": scale.t().contiguous().half(),
    }


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "modules_to_not_convert": ["lm_head"],
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "naive-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "naive-quantized",
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
BITSANDBYTES = {"load_in_8bit": True}  # as it was written before methods had names
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("config", "change", "precision", "says"),
    [
        (FP8, in_fp8, "bf16", "fp8 checkpoint, expanded to bf16"),
        (COMPRESSED, in_int8, "fp32", "compressed-tensors checkpoint, expanded to fp32"),
        (GPTQ, packed, "int4", "gptq checkpoint; the rest in 16 bits"),
        (BITSANDBYTES, by_bitsandbytes, "int8", "bitsandbytes checkpoint; the rest in 16 bits"),
    ],
)
def test_a_checkpoint_of_others_generates_in_its_precision(
    config: Mapping[str, Any], change: Change, precision: str, says: str, tmp_path: Path
) -> None:
    method = method_of({"quantization_config": config})
    if module := method if method not in READERS else READERS[method].module:
        pytest.importorskip(module)
    path = checkpoint(tmp_path / "theirs", config, change)
    worker = Worker()
    job = request("advertisegen-synthetic", model=path, precision=precision, prompts=1)
    made = text_generation.run(job, worker.context())
    assert says in made.precision_detail
    (resident,) = worker.loaded.values()
    plain = load_causal_model(open_model("tiny-chatglm3"), dtype=torch.float32)
    ids = torch.tensor([[64, 70, 80, 90, 100, 110]])
    with torch.no_grad():
        theirs = resident.engine.model(input_ids=ids).logits.float().softmax(-1)
        divergence = (theirs.log() - plain(input_ids=ids).logits.log_softmax(-1)) * theirs
    assert 0 < float(divergence.sum(-1).max()) < 0.02
    kinds = {type(layer).__module__ for layer in resident.engine.model.modules()}
    assert not any(kind.startswith("auto_round_kernel") for kind in kinds)
    generation = find_workload("text-generation").validate({"quality": True})
    other = "bf16" if precision == "int8" else "int8"
    wrong = replace(asked(model=path, precision=other), parameters=generation)
    found = {one.setting: one for one in refuse(wrong, "text-generation")}
    assert (
        precision in found["precision"].reason and "quantised already" in found["precision"].reason
    )
    assert ("quality" in found) == precision.startswith("int")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**GPTQ, "desc_act": True}, "its inputs are reordered (desc_act)"),
        ({**GPTQ, "bits": 8}, "a gptq checkpoint in 8 bits, and 4 are read"),
        (MODELOPT, "transformers skips its quantization_config (quant_method modelopt)"),
        ({"bits": 4}, "its quantization_config has no quant_method"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(config, says, tmp_path) -> None:
    path = checkpoint(tmp_path / "theirs", config)
    generation = find_workload("text-generation").validate({})
    job = replace(asked(model=path, precision="int4"), parameters=generation)
    found = [one for one in refuse(job, "text-generation") if says in one.reason]
    assert found and found[0].unsupported and found[0].hint
    with pytest.raises(Unsupported, match="cannot be read"):
        reading_arguments({"quantization_config": config}, path)


def test_values_without_their_scales_are_not_read(tmp_path: Path) -> None:
    """ModelOpt's, whose method transformers does not know; vLLM reads them itself."""

    def in_their_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().max() / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}

    path = checkpoint(tmp_path / "theirs", MODELOPT, in_their_fp8)
    with pytest.raises(Unsupported, match="would be read without their scales"):
        load_causal_model(open_model(path), dtype=torch.bfloat16)
    job = asked(model=path, precision="bf16")
    reasons = {
        engine: [one.reason for one in text_refusals(replace(job, engine=engine))]
        for engine in ("transformers", "vllm")
    }
    assert "read without their scales" in reasons["transformers"][0] and not reasons["vllm"]


@pytest.mark.parametrize("method", [name for name, one in READERS.items() if one.module])
def test_a_missing_package_is_named_with_its_command(method, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        Unsupported, match=rf"which needs the package {READERS[method].module}: pip"
    ):
        reading_arguments({"quantization_config": {"quant_method": method}}, "m", on_host=False)


def test_fp8_is_expanded_where_a_card_could_compute_with_it(tmp_path, monkeypatch) -> None:
    path = checkpoint(tmp_path / "theirs", FP8, in_fp8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for arguments, kinds in (
        ({}, {("Linear", torch.bfloat16)}),
        (as_stored({"quantization_config": FP8}), {("FP8Linear", torch.float8_e4m3fn)}),
    ):
        model = load_causal_model(
            open_model(path), dtype=torch.bfloat16, device_map={"": "cpu"}, **arguments
        )
        layers = [each for name, each in model.named_modules() if name.endswith("_proj")]
        found = {(type(each).__name__, each.weight.dtype) for each in layers}
        assert found == kinds


def test_a_transformers_that_cannot_expand_fp8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:

    class Old:
        def __init__(self, activation_scheme: str = "dynamic", **_: Any) -> None: ...

    monkeypatch.setattr("transformers.FineGrainedFP8Config", Old)
    with pytest.raises(Unsupported, match="expands no fp8 checkpoint"):
        reading_arguments({"quantization_config": FP8}, "m", on_host=False)


def test_awq_is_read_on_cards_only() -> None:
    """AutoRound has no layers for it that a processor runs and that are right."""
    with pytest.raises(Unsupported, match="read on cards only"):
        reading_arguments({"quantization_config": {"quant_method": "awq"}}, "m")
