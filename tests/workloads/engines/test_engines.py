"""Engines: which there are, what processes they need, and their rules, as the plan asks them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import core_cases
import pytest
from generation_cases import described, request
from recorded_vllm import INTERFACE

from orchestrator.core.job import Accelerator
from workloads import engines
from workloads.base import BadConfiguration, DataMissing, Refusal, Unsupported
from workloads.engines.optimum_habana import quantization
from workloads.models.rules import text_refusals
from workloads.registry import find_workload, function_of
from workloads.rules import engine_refusals, refusals

ROOT = Path(__file__).resolve().parents[3]

KNOWN = """\
import sys
from workloads.engines import ENGINES, process_kind
from workloads.registry import WORKLOADS
process_kind("optimum-habana", "hpu", {}), list(ENGINES.values())
assert all(entry.engines for entry in WORKLOADS.values() if entry.ability)
sys.exit(" ".join({"torch", "transformers", "optimum"} & set(sys.modules)) or 0)
"""


def test_no_library_is_imported_to_know_the_engines() -> None:
    """A plan asks for their names, rules and kinds of process."""
    subprocess.run([sys.executable, "-c", KNOWN], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("engine", "cards", "mode", "kind"),
    [
        ("transformers", "CPU", None, ""),
        ("transformers", "HPU", None, ""),
        ("transformers", "HPU", "compile", "compile"),
        ("optimum-habana", "HPU", None, "optimum-habana/lazy"),
        ("optimum-habana", "HPU", "compile", "optimum-habana/compile"),
        ("optimum-habana", "HPU", "eager", "optimum-habana"),
        ("vllm", "GPU", None, "vllm"),
        ("vllm-gaudi", "HPU", None, "vllm-gaudi/compile"),
    ],
)
def test_jobs_share_a_process_only_if_it_suits_both(engine, cards, mode, kind) -> None:
    """vLLM's core is in the worker's process and gives memory back with it alone."""
    parameters = (("hpu_mode", mode),) if mode else ()
    job = core_cases.a_job(engine=engine, accelerator=Accelerator(cards), parameters=parameters)
    assert job.process_kind == kind and kind in engines.process_kinds(job.accelerator.device)
    assert job.alone == engine.startswith("vllm")
    in_process = engines.variables_of(kind).get("VLLM_ENABLE_V1_MULTIPROCESSING")
    assert in_process == ("0" if job.alone else None)


def test_a_precision_that_switches_its_process_for_good_has_its_own() -> None:
    """fp8 with optimum-habana and its calibration, in whatever mode; no other engine's."""
    for mode in ("lazy", "compile", "eager"):
        of = partial(engines.process_kind, "optimum-habana", "hpu", {"hpu_mode": mode})
        fp8 = of(workload="text-generation", precision="fp8")
        assert fp8 == of(workload="fp8-calibration", precision="bf16")
        assert fp8 != of(workload="text-generation", precision="bf16")
        assert fp8 in engines.process_kinds("hpu")
    assert engines.process_kind("transformers", "hpu", {}, precision="fp8") == ""


def test_an_engine_without_its_package_or_device_refuses() -> None:
    """The message names the package and how it is installed; nothing falls back."""
    with pytest.raises(Unsupported, match="runs on hpu, not on cpu"):
        engines.engine_function("optimum-habana", "generate", "cpu")
    for name, device in (("optimum-habana", "hpu"), ("vllm", "cuda"), ("vllm-gaudi", "hpu")):
        with pytest.raises(Unsupported, match="needs the package") as error:
            engines.engine_function(name, "generate", device)
        assert engines.find_engine(name).install in str(error.value)
    with pytest.raises(BadConfiguration, match=r"no engine 'tgi'\. There is: transformers"):
        engines.engine_function("tgi", "generate", "cpu")
    with pytest.raises(BadConfiguration, match="vllm does not train; transformers, optimum-habana"):
        engines.engine_function("vllm", "train", "cuda")


@pytest.mark.parametrize("name", engines.ENGINES)
def test_the_functions_that_an_engine_names_are_there(name) -> None:
    """Plans import none of them."""
    abilities = engines.find_engine(name).abilities.values()
    assert all(callable(function_of(ability.function)) for ability in abilities)


def test_a_calibration_belongs_to_model_cards_and_kind_of_card(tmp_path, monkeypatch) -> None:
    """Scales do not transfer."""
    monkeypatch.setenv("NIGHTGRID_CALIBRATIONS", str(tmp_path))
    what = product(("org/a", "org/b"), (1, 8), ("GAUDI2", "GAUDI3"))
    places = {quantization.calibration_directory(*each) for each in what}
    assert len(places) == 8 and all(place.parent == tmp_path for place in places)


def test_fp8_asks_for_its_calibration(tmp_path, monkeypatch) -> None:
    compressor = SimpleNamespace(convert=None)
    monkeypatch.setitem(sys.modules, "neural_compressor.torch.quantization", compressor)
    with pytest.raises(DataMissing, match="and there is none in"):
        quantization.quantize(object(), request("d", precision="fp8"), tmp_path)


CONTINUOUS = {"model": "m", "engine": "graph", "batching": "continuous", "batch_size": 4}
HABANA = {"engine": "optimum-habana", "device": "hpu", "precision": "bf16"}
ONNX, STOCK = {"engine": "onnxruntime"}, {"engine": "transformers"}
UNFOLDED = ONNX | {"constant_folding": False}
CALIBRATED = ONNX | {"precision": "int8", "calibration": "texts"}


def refused(ability: str = "generate", **changes: Any) -> list[Refusal]:
    return list(engine_refusals(described(**changes), ability))


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        (HABANA | {"device": "cuda"}, "engine", "runs on hpu, not on cuda"),
        ({"engine": "vllm", "device": "hpu"}, "engine", "runs on cuda and cpu, not on hpu"),
        ({"hpu_mode": "lazy"}, "hpu_mode", "no such"),
        ({"device": "hpu", "hpu_mode": "lazy"}, "hpu_mode", "does not cut graphs"),
        (HABANA | {"cards": 2, "tensor_parallel": 2}, "tensor_parallel", "every card the whole"),
        ({"engine": "vllm", "device": "cuda", "tensor_parallel": 2}, "tensor_parallel", "whole"),
        ({"engine": "vllm", "device": "cuda", "cards": 2}, "cards", "runs on one card"),
        ({"engine": "vllm-gaudi", "device": "hpu", "cards": 2}, "cards", "runs on one card"),
        ({"engine": "graph", "device": "hpu", "torch_compile": True}, "torch_compile", "always"),
        ({"engine": "graph", "device": "cuda", "torch_compile": True}, "torch_compile", "always"),
        ({"engine": "graph", "device": "hpu", "hpu_mode": "lazy"}, "hpu_mode", "of a step"),
        ({"engine": "graph", "cards": 2, "tensor_parallel": 2}, "tensor_parallel", "whole model"),
        (CALIBRATED | {"model": "tiny-t5"}, "calibration", "decoders and encoders only"),
        ({"device": "hpu", "torch_compile": True}, "torch_compile", "and hpu_mode: compile"),
        ({"precision": "int8", "torch_compile": True}, "torch_compile", "run in eager mode"),
        (
            {"torch_compile": True, "sparse_kernels": True, "device": "cuda", "precision": "bf16"},
            "torch_compile",
            "plain matrices only",
        ),
        ({"model": "tiny-t5", "torch_compile": True}, "torch_compile", "one decoder"),
        ({"engine": "graph", "adapter": "mine"}, "adapter", "engine transformers does"),
    ],
)
def test_what_an_engine_lacks_becomes_a_row_that_says_so(changes, setting, words) -> None:
    """Nothing is wrong with the grid, so the job is unsupported, not refused."""
    (refusal,) = refused(**changes)
    assert refusal.setting == setting and refusal.unsupported
    assert words in f"{refusal.reason} {refusal.hint}"


@pytest.mark.parametrize(
    ("ability", "changes", "setting"),
    [
        ("generate", ONNX | {"calibration": "texts"}, "calibration"),
        ("encode", ONNX | {"model": "tiny-bert", "calibration": "texts"}, "calibration"),
        ("images", CALIBRATED, "calibration"),
        ("images", ONNX | {"torch_compile": True}, "torch_compile"),
        ("calibrate-activations", UNFOLDED, "constant_folding"),
        ("calibrate-activations", ONNX | {"precision": "int8"}, "precision"),
    ],
)
def test_what_makes_no_graph_is_refused(ability, changes, setting) -> None:
    assert not refused(ability, **ONNX)
    (refusal,) = refused(ability, **changes)
    assert refusal.setting == setting and refusal.reason and refusal.hint


@pytest.mark.parametrize(
    ("workload", "usual", "changes", "setting", "words"),
    [
        ("text-generation", CONTINUOUS, ONNX, "batching", "does not do continuous batching"),
        ("text-generation", CONTINUOUS, STOCK, "batching", "write engine: graph"),
        ("text-generation", CONTINUOUS, {"device": "hpu"}, "batching", "compiles anew"),
        ("text-generation", CONTINUOUS, {"profile": True}, "profile", "one static batch"),
        ("onnx-calibration", ONNX, {"cards": 2}, "cards", "one card measures"),
        ("onnx-calibration", ONNX, {"batch_size": 2}, "batch_size", "without padding"),
        ("onnx-calibration", ONNX, {"batch_size": "max"}, "batch_size", "without padding"),
    ],
)
def test_a_workload_says_what_it_cannot_do(workload, usual, changes, setting, words) -> None:
    """Continuous batching; and a calibration reads one prompt on one card."""
    spec = find_workload(workload)
    assert not refusals(spec, described(**usual))
    (refusal,) = refusals(spec, described(**usual | changes))
    assert (refusal.setting, refusal.unsupported) == (setting, workload == "text-generation")
    assert words in f"{refusal.reason}; {refusal.hint}" and refusal.hint


def checkpoint(directory: Path, **config: Any) -> str:
    """A Llama's checkpoint as far as a plan reads it."""
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).touch()
    return str(directory)


def test_gaudi_takes_four_bits_from_checkpoints_that_have_them(tmp_path) -> None:
    """GPTQ, AWQ and AutoRound; a checkpoint in 16 bits is named in the plan."""
    for method in quantization.FOUR_BIT:
        model = checkpoint(tmp_path, quantization_config={"quant_method": method, "bits": 4})
        assert not refused(**HABANA | {"model": model, "precision": "int4"})
    for config in ({}, {"quantization_config": {"quant_method": "gptq", "bits": 8}}):
        model = checkpoint(tmp_path, **config)
        (refusal,) = refused(**HABANA | {"model": model, "precision": "int4"})
        assert refusal.unsupported and "quantised already" in refusal.reason
    with pytest.raises(Unsupported, match="pip install auto-round-hpu"):
        quantization.four_bit_arguments(
            {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "m"
        )


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
def test_vllm_takes_a_checkpoint_in_its_own_precision(method, bits, precision, reason, tmp_path):
    """No rule of other engines' loaders is in the way."""
    config = {"quantization_config": {"quant_method": method, "bits": bits}} if method else {}
    model = checkpoint(tmp_path, **config)
    job = described(engine="vllm", device="cuda", model=model, precision=precision)
    all_refused = (*engine_refusals(job, "generate"), *text_refusals(job))
    unsupported = [refusal.reason for refusal in all_refused if refusal.unsupported]
    assert len(unsupported) == bool(reason) and all(reason in each for each in unsupported)


def test_a_checkpoint_of_older_bitsandbytes_is_none_of_plain_weights(tmp_path) -> None:
    model = checkpoint(tmp_path, quantization_config={"load_in_8bit": True})
    job = described(engine="vllm", device="cuda", model=model, precision="bf16")
    assert any("bitsandbytes" in one.reason for one in engine_refusals(job, "generate"))


def test_the_gaudi_plugin_takes_no_type_that_it_would_replace() -> None:
    assert {f"torch.{name}" for name in ("float16", "float32")} == set(INTERFACE["replaced_dtypes"])
    for precision in ("fp16", "fp32"):
        support = engines.find_engine("vllm-gaudi").precisions[precision, "hpu"]
        assert not support.supported and "computes in bf16 whatever" in support.reason


@pytest.mark.parametrize(
    ("engine", "tokens", "expected"),
    [("openvino", 13, True), ("openvino", 12, False), ("transformers", 13, False)],
)
def test_texts_fit_into_a_window_that_an_engine_lacks(tmp_path, engine, tokens, expected) -> None:
    """Layers see 12 tokens, and the library's attention all."""
    model = checkpoint(tmp_path, sliding_window=12)
    job = described(engine=engine, model=model, input_tokens=9, output_tokens=tokens - 9)
    unsupported = [refusal.reason for refusal in text_refusals(job) if refusal.unsupported]
    assert bool(unsupported) == expected
    assert all("the 12 that layers" in reason for reason in unsupported)
