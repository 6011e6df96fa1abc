"""The engines vllm and vllm-gaudi on the recorded interface: what they ask for and read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_cases import MODEL, PROMPTS, Worker, request, write_dataset
from recorded_vllm import install, next_token

from workloads import engines, text_generation
from workloads.base import BadConfiguration, Unsupported
from workloads.devices import device_spec
from workloads.devices.cpu import CpuDevice
from workloads.models.catalog import known_config, positions_of

#: Each engine with its device and the kind of its processes.
ENGINES = {"vllm": ("cuda", "vllm"), "vllm-gaudi": ("hpu", "vllm-gaudi/compile")}
both = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, kind in ENGINES.values():
        for name, value in engines.variables_of(kind).items():
            monkeypatch.setenv(name, value)


def run(tmp_path: Path, engine: str = "vllm", **changes: Any) -> Any:
    class Card(CpuDevice):
        spec = device_spec(ENGINES[engine][0])

    fields = {"engine": engine, "precision": "bf16", "output_tokens": 5, "ignore_eos": True}
    fields |= {"prompts": 6}
    job = request(write_dataset(tmp_path / "d.jsonl", PROMPTS[:6]), **(fields | changes))
    worker = Worker()
    result = text_generation.run(job, dataclasses.replace(worker.context(), device=Card()))
    return result, next(iter(worker.loaded.values())).engine, worker.phases


@both
def test_the_row_has_what_the_library_says_that_it_computes_in(engine, tmp_path, monkeypatch):
    """Data type, format and cache, read back; the core in this process, whose variables say so."""
    made = install(monkeypatch)
    result, _, _ = run(tmp_path, engine)
    assert made[0]["dtype"] == "bfloat16" and "quantization" not in made[0]
    assert made[0]["max_num_seqs"] == 2 and made[0]["enable_prefix_caching"] is False
    assert result.details["computes_in"] == "bfloat16" and result.details["quantization"] == "none"
    assert result.weight_bytes == 2 * result.parameter_count
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(Unsupported, match="cannot acquire the card"):
        run(tmp_path, engine)
    assert len(made) == 1


def test_buckets_are_compiled_in_a_phase_of_their_own(tmp_path, monkeypatch) -> None:
    """The row has the plugin's buckets, its block size and the time of its warm-up. Eager mode is
    vLLM's own argument."""
    made = install(monkeypatch)
    result, _, phases = run(tmp_path, "vllm-gaudi")
    assert made[0]["enforce_eager"] is False
    assert result.details["kv_block_tokens"] == "128"
    assert result.details["buckets"] == ("2 prompt up to (1, 256, 0), 3 decode up to (2, 1, 16)")
    assert float(result.details["engine_warmup_s"]) >= 0
    assert phases[:3] == ["load", "compile", "load"]
    run(tmp_path, "vllm-gaudi", hpu_mode="eager")
    assert made[1]["enforce_eager"] is True


@pytest.mark.parametrize(
    ("engine", "batching"),
    [("vllm", "static"), ("vllm", "continuous"), ("vllm-gaudi", "static")],
)
def test_every_prompt_gets_its_tokens(engine, batching, tmp_path, monkeypatch) -> None:
    """Two places, six prompts; nothing is padded; in continuous batches each step is told."""
    install(monkeypatch)
    result, engine, _ = run(tmp_path, engine, batching=batching)
    for item in result.items:
        prompt = engine.encode(PROMPTS[item.index])
        assert list(item.output_ids) == [next_token(prompt, position) for position in range(5)]
    samples = result.samples
    assert sum(sample.output_tokens for sample in samples) == 6 * 5
    assert sum(s.computed_tokens - s.input_tokens for s in samples) == 6 * 4
    assert bool(samples[0].step_s) == (batching == "continuous")


@pytest.mark.parametrize("methods", [("fp8", "fp8_per_tensor"), ("fp8",)])
def test_fp8_is_made_while_it_loads(methods, tmp_path, monkeypatch) -> None:
    """By vLLM's own argument, which 0.33 renamed; bytes and share are those of the loaded model; a
    library that kept the weights as they are does not get a row in fp8."""
    parts = [torch.zeros(8, 8, dtype=torch.float8_e4m3fn)]
    made = install(monkeypatch, parts=parts, methods=methods)
    result, _, _ = run(tmp_path, precision="fp8")
    assert made[0]["quantization"] == methods[-1] and made[0]["dtype"] == "bfloat16"
    assert result.details["quantization"] == methods[-1] and result.weight_bytes == 64
    install(monkeypatch, quantization="")
    with pytest.raises(BadConfiguration, match="asked for in fp8, and vllm has its weights as"):
        run(tmp_path, precision="fp8")


@both
@pytest.mark.parametrize(("read", "written"), [(120, 8), (121, 8), (None, 40), (None, 250)])
def test_it_is_made_for_the_texts_of_the_job(engine, read, written, tmp_path, monkeypatch) -> None:
    """In whole blocks, not for all positions of the model: the plugin compiles buckets up to it."""
    made = install(monkeypatch)
    result, loaded, _ = run(tmp_path, engine, input_tokens=read, output_tokens=written)
    longest = read or max(len(loaded.encode(PROMPTS[item.index])) for item in result.items)
    positions = made[0]["max_model_len"]
    assert positions % 128 == 0 and 0 <= positions - longest - written < 128
    assert result.details["max_model_len"] == str(positions)


def test_it_is_made_for_the_models_positions_at_most(tmp_path, monkeypatch) -> None:
    """Prompts that are cut to them are read so far."""
    made = install(monkeypatch)
    most = positions_of(known_config(MODEL) or {})
    assert most is not None
    run(tmp_path, output_tokens=most - 10, too_long="cut", prompts=1, batch_size=1)
    assert made[0]["max_model_len"] == most


@both
def test_another_data_type_is_refused(engine, tmp_path, monkeypatch) -> None:
    install(monkeypatch, dtype="float16")
    with pytest.raises(Unsupported, match="computes in float16, and the job asks for bfloat16"):
        run(tmp_path, engine)
