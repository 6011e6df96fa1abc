"""The engine vllm-gaudi, against the interface recorded from its sources (versions in the file)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from generation_cases import PROMPTS, Worker, request, write_dataset
from recorded_vllm import INTERFACE, install, next_token
from test_engines import asked, refusals

from orchestrator.core.job import Accelerator, Job
from workloads import engines, text_generation
from workloads.base import Unsupported
from workloads.devices import device_spec
from workloads.devices.cpu import CpuDevice

KIND = "vllm-gaudi/compile"


class Card(CpuDevice):
    """A Gaudi card, as far as an engine asks that computes nothing."""

    spec = device_spec("hpu")


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of its processes."""
    for name, value in engines.variables_of(KIND).items():
        monkeypatch.setenv(name, value)


def run(dataset: str, worker: Worker | None = None, **changes: Any) -> Any:
    fields = {"engine": "vllm-gaudi", "precision": "bf16", "output_tokens": 5, "ignore_eos": True}
    job = request(dataset, **(fields | changes))
    worker = worker or Worker()
    context = dataclasses.replace(worker.context(), device=Card())
    return text_generation.run(job, context)


def test_it_runs_on_the_recorded_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call fits the real signatures. The row has the engine's buckets, its block size and the
    time of its warm-up, which is a phase of its own; nothing but its own tokens is counted."""
    made, worker = install(monkeypatch), Worker()
    result = run(write_dataset(tmp_path / "d.jsonl", PROMPTS[:4]), worker, prompts=4)
    (arguments,) = made
    assert arguments["dtype"] == "bfloat16" and arguments["max_num_seqs"] == 2
    assert arguments["enforce_eager"] is False and arguments["enable_prefix_caching"] is False
    assert result.details["kv_block_tokens"] == "128"
    assert result.details["buckets"] == ("2 prompt up to (1, 256, 0), 3 decode up to (2, 1, 16)")
    assert float(result.details["engine_warmup_s"]) >= 0
    first = worker.phases.index("compile")
    assert worker.phases[:first] == ["load"] and worker.phases[first + 1] == "load"
    assert sum(sample.output_tokens for sample in result.samples) == 4 * 5
    engine = next(iter(worker.loaded.values())).engine
    for item in result.items:
        prompt = engine.encode(PROMPTS[item.index])
        written = [next_token(prompt, position) for position in range(5)]
        assert item.output_text == engine.decode(written)


def test_eager_mode_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own argument; left out, it compiles."""
    made = install(monkeypatch)
    run(write_dataset(tmp_path / "d.jsonl", PROMPTS[:2]), prompts=2, hpu_mode="eager")
    assert made[0]["enforce_eager"] is True


def test_a_row_never_bears_another_data_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plugin replaces is refused by the plan; what an engine really computes in is read
    from it, and refused where it differs."""
    assert {f"torch.{name}" for name in ("float16", "float32")} == set(INTERFACE["replaced_dtypes"])
    for precision in ("fp16", "fp32"):
        support = engines.find_engine("vllm-gaudi").precisions[precision, "hpu"]
        assert not support.supported and "computes in bf16 whatever" in support.reason
    install(monkeypatch, dtype="float16")
    with pytest.raises(Unsupported, match="computes in float16, and the job asks for bfloat16"):
        run(write_dataset(tmp_path / "d.jsonl", PROMPTS[:2]), prompts=2)


def test_the_core_never_starts_beside_the_card_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are told to run it themselves; in another one nothing is loaded."""
    assert engines.variables_of(KIND)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert engines.variables_of("optimum-habana/lazy") == engines.variables_of("") == {}
    made = install(monkeypatch)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    with pytest.raises(Unsupported, match="cannot acquire the card"):
        run(write_dataset(tmp_path / "d.jsonl", PROMPTS[:2]), prompts=2)
    assert not made


def test_each_job_has_a_process_of_its_own_on_one_card() -> None:
    """It sizes itself for one batch size and gives memory back with its process; a gang would be
    several cores that know nothing of each other."""
    fields: dict[str, Any] = {
        "experiment": "e",
        "workload": "text-generation",
        "model": "m",
        "dataset": "d",
        "accelerator": Accelerator.HPU,
        "precision": "bf16",
        "batch_size": 1,
    }
    assert Job(**fields, cards=1, engine="vllm-gaudi").alone
    assert not Job(**fields, cards=1, engine="optimum-habana").alone
    assert Job(**fields, cards=1, engine="vllm-gaudi").process_kind == KIND
    (refusal,) = refusals(asked(engine="vllm-gaudi", cards=2))
    assert refusal.unsupported and "runs on one card" in refusal.reason


def test_the_recorded_interface_rejects_what_the_real_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check of the check: an argument or a field that vLLM has not."""
    install(monkeypatch)
    from vllm import LLM, SamplingParams

    with pytest.raises(TypeError, match="EngineArgs has no max_sequences"):
        LLM("m", dtype="bfloat16", max_sequences=2)
    with pytest.raises(TypeError, match="SamplingParams has no greedy"):
        SamplingParams(greedy=True)
