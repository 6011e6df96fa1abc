"""Engines: which there are, what processes they need, and their rules, as the plan asks them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from generation_cases import described, request
from recorded_vllm import INTERFACE

from workloads import engines
from workloads.base import BadConfiguration, DataMissing, Refusal, Unsupported
from workloads.devices import DEVICES
from workloads.engines.optimum_habana import quantization
from workloads.models.rules import text_refusals
from workloads.registry import find_workload, function_of
from workloads.rules import engine_refusals, refusals

ROOT = Path(__file__).resolve().parents[3]

OTHERS = """\
from workloads.engines.base import Ability, EngineSpec
def spec(name):
    return EngineSpec(
        name=name,
        summary="echoes",
        devices=("cpu",),
        abilities={"generate": Ability(function="echo_engine:load")},
        install="pip install echo",
    )
ECHO, OURS = spec("echo"), spec("vllm")
"""
LISTING = """\
import sys
from workloads.engines import ENGINES, process_kind
from workloads.registry import WORKLOADS
print(*WORKLOADS["text-generation"].engines, *WORKLOADS["finetuning"].engines)
print(ENGINES["vllm"].devices, WORKLOADS["text-generation"].takes_engine("echo"))
process_kind("optimum-habana", "hpu", {}), list(ENGINES.values())
print(*{"torch", "transformers", "optimum"} & set(sys.modules))
"""


def test_another_package_brings_an_engine_and_none_is_imported_to_know_them(tmp_path) -> None:
    """It stands beside ours and replaces none; a plan asks for names, rules and kinds of process,
    and torch is not loaded for that."""
    (tmp_path / "echo_spec.py").write_text(OTHERS)
    (tmp_path / "echo-1.dist-info").mkdir()
    (tmp_path / "echo-1.dist-info" / "METADATA").write_text("Name: echo\nVersion: 1\n")
    (tmp_path / "echo-1.dist-info" / "entry_points.txt").write_text(
        "[nightgrid.engines]\necho = echo_spec:ECHO\nvllm = echo_spec:OURS\n"
    )
    listed = subprocess.run(
        [sys.executable, "-c", LISTING],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        check=True,
    ).stdout.splitlines()
    names = [*engines.engines_for("generate"), "echo", *engines.engines_for("train")]
    assert listed == [" ".join(names), "('cuda', 'cpu') True", ""]


@pytest.mark.parametrize(
    ("engine", "device", "parameters", "kind"),
    [
        ("transformers", "cpu", {}, ""),
        ("transformers", "hpu", {}, ""),
        ("transformers", "hpu", {"hpu_mode": "compile"}, "compile"),
        ("optimum-habana", "hpu", {}, "optimum-habana/lazy"),
        ("optimum-habana", "hpu", {"hpu_mode": "compile"}, "optimum-habana/compile"),
        ("optimum-habana", "hpu", {"hpu_mode": "eager"}, "optimum-habana"),
        ("vllm", "cuda", {}, "vllm"),
    ],
)
def test_jobs_share_a_process_only_if_it_suits_both(engine, device, parameters, kind) -> None:
    assert engines.process_kind(engine, device, parameters) == kind
    assert kind in engines.process_kinds(device)


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
    places = {
        quantization.calibration_directory(model, cards, card)
        for model in ("org/a", "org/b")
        for cards in (1, 8)
        for card in ("GAUDI2", "GAUDI3")
    }
    assert len(places) == 8 and all(place.parent == tmp_path for place in places)


def test_fp8_asks_for_its_calibration(tmp_path, monkeypatch) -> None:
    compressor = SimpleNamespace(convert=None)
    monkeypatch.setitem(sys.modules, "neural_compressor.torch.quantization", compressor)
    with pytest.raises(DataMissing, match="and there is none in"):
        quantization.quantize(object(), request("d", precision="fp8"), tmp_path)


CONTINUOUS = {"model": "m", "engine": "graph", "batching": "continuous", "batch_size": 4}
HABANA = {"engine": "optimum-habana", "device": "hpu", "precision": "bf16"}
ONNX = {"engine": "onnxruntime"}
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
        (ONNX | {"device": "hpu"}, "engine", "not on hpu"),
        (ONNX | {"tensor_parallel": 2}, "tensor_parallel", "whole model"),
        (CALIBRATED | {"model": "tiny-t5"}, "calibration", "decoders and encoders only"),
        ({"device": "hpu", "torch_compile": True}, "torch_compile", "and hpu_mode: compile"),
        ({"precision": "int8", "torch_compile": True}, "torch_compile", "run in eager mode"),
        (
            {"torch_compile": True, "sparse_kernels": True, "device": "cuda", "precision": "bf16"},
            "torch_compile",
            "plain matrices only",
        ),
        ({"model": "tiny-t5", "torch_compile": True}, "torch_compile", "one decoder"),
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
        ("generate", UNFOLDED | {"fusions": True}, "fusions"),
        ("generate", ONNX | {"calibration": "texts"}, "calibration"),
        ("encode", ONNX | {"model": "tiny-bert", "calibration": "texts"}, "calibration"),
        ("images", CALIBRATED, "calibration"),
        ("images", ONNX | {"torch_compile": True}, "torch_compile"),
        ("generate", UNFOLDED | {"precision": "int8"}, "constant_folding"),
        ("calibrate-activations", UNFOLDED, "constant_folding"),
        ("calibrate-activations", ONNX | {"precision": "int8"}, "precision"),
    ],
)
def test_what_makes_no_graph_is_refused(ability, changes, setting) -> None:
    assert not refused(ability, **ONNX)
    (refusal,) = refused(ability, **changes)
    assert refusal.setting == setting and refusal.reason and refusal.hint


@pytest.mark.parametrize("engine", engines.engines_for("generate"))
def test_adapters_and_attentions_are_taken_where_they_are_declared(engine) -> None:
    """An engine that ignored them would give its rows a wrong name."""
    spec = engines.find_engine(engine)
    (device, *_) = (device for device in DEVICES if spec.runs_on(device))
    able = spec.abilities["generate"]
    taken = {"adapter": able.adapters, "attention": able.attentions is None}
    for setting, value in (("adapter", "mine"), ("attention", "eager"), ("attention", "sdpa")):
        all_refused = refused(engine=engine, device=device, precision="bf16", **{setting: value})
        of_setting = [refusal for refusal in all_refused if refusal.setting == setting]
        assert bool(of_setting) == (value != "sdpa" and not taken[setting])
        assert all(refusal.unsupported for refusal in of_setting)
        if setting == "adapter":
            assert all("transformers" in refusal.hint for refusal in of_setting)


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({"engine": "onnxruntime"}, "batching", "does not do continuous batching"),
        ({"engine": "transformers"}, "batching", "write engine: graph"),
        ({"device": "hpu"}, "batching", "compiles anew"),
        ({"profile": True}, "profile", "one static batch"),
    ],
)
def test_continuous_batching_is_refused_where_it_cannot_be(changes, setting, words) -> None:
    spec = find_workload("text-generation")
    assert not refusals(spec, described(**CONTINUOUS))
    (refusal,) = refusals(spec, described(**CONTINUOUS | changes))
    assert refusal.setting == setting and refusal.unsupported
    assert words in f"{refusal.reason}; {refusal.hint}"


@pytest.mark.parametrize(
    "changes", [{"cards": 2}, {"batch_size": 2}, {"batch_size": "max"}], ids=str
)
def test_a_calibration_reads_one_prompt_on_one_card(changes) -> None:
    spec = find_workload("onnx-calibration")
    assert not refusals(spec, described(**ONNX))
    (refusal,) = refusals(spec, described(**ONNX | changes))
    assert refusal.setting in changes and refusal.hint


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
