"""Engines: which there are, what they take, and what processes they need."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from generation_cases import request

from workloads import engines
from workloads.base import (
    BadConfiguration,
    DataMissing,
    JobDescription,
    Refusal,
    Request,
    Unsupported,
)
from workloads.devices import DEVICES
from workloads.engines.optimum_habana import quantization
from workloads.registry import WORKLOADS
from workloads.rules import engine_refusals

ROOT = Path(__file__).resolve().parents[3]


def asked(**given) -> JobDescription:
    fields = {
        "model": "tiny-chatglm3",
        "dataset": "advertisegen-synthetic",
        "precision": "bf16",
        "device": "hpu",
        "batch_size": 1,
        "cards": 1,
        "parameters": {},
        "engine": "optimum-habana",
    }
    return JobDescription(**(fields | given))


def refusals(described: JobDescription) -> list[Refusal]:
    return list(engine_refusals(described, "generate"))


def job(precision: str, **more: str) -> Request:
    return request("advertisegen-synthetic", engine="optimum-habana", precision=precision, **more)


def test_no_engine_is_imported_to_know_them() -> None:
    """A plan asks for names, rules and kinds of process; torch is not loaded for that."""
    code = (
        "import sys\nfrom workloads import engines\n"
        "engines.process_kind('optimum-habana', 'hpu', {}), list(engines.ENGINES.values())\n"
        "sys.exit(','.join({'torch', 'transformers', 'optimum'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


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
    """An engine that patches others' libraries, and a card's mode, ask for a process of their own;
    every kind a job may need is known beforehand."""
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


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "cuda"}, "runs on hpu, not on cuda"),
        ({"engine": "vllm"}, "runs on cuda and cpu, not on hpu"),
        (
            {"engine": "transformers", "device": "cpu", "parameters": {"hpu_mode": "lazy"}},
            "no such",
        ),
        ({"engine": "transformers", "parameters": {"hpu_mode": "lazy"}}, "does not cut graphs"),
        ({"cards": 2, "parameters": {"tensor_parallel": 2}}, "every card the whole model"),
        ({"engine": "vllm", "device": "cuda", "parameters": {"tensor_parallel": 2}}, "whole model"),
    ],
)
def test_what_an_engine_does_not_take_becomes_a_row_that_says_so(given, reason) -> None:
    """Nothing is wrong with the grid, so the job is unsupported, not refused."""
    (refusal,) = refusals(asked(**given))
    assert refusal.unsupported and reason in refusal.reason


@pytest.mark.parametrize("engine", engines.engines_for("generate"))
def test_adapters_and_attentions_are_taken_where_they_are_declared(engine) -> None:
    """By every engine alike: one that ignored them would give its rows a wrong name."""
    spec = engines.find_engine(engine)
    (device, *_) = (device for device in DEVICES if spec.runs_on(device))
    able = spec.abilities["generate"]
    taken = {"adapter": able.adapters, "attention": able.attentions is None}
    for setting, value in (("adapter", "mine"), ("attention", "eager"), ("attention", "sdpa")):
        job = asked(engine=engine, device=device, parameters={setting: value})
        found = [refusal for refusal in refusals(job) if refusal.setting == setting]
        assert bool(found) == (value != "sdpa" and not taken[setting])
        assert all(refusal.unsupported for refusal in found)
        assert all("transformers" in each.hint for each in found if setting == "adapter")


@pytest.mark.parametrize(
    "given",
    [
        *({"parameters": mode} for mode in ({}, {"hpu_mode": "lazy"}, {"hpu_mode": "compile"})),
        {"engine": "transformers", "device": "cpu"},
    ],
)
def test_what_an_engine_takes_is_not_refused(given) -> None:
    """Its own modes, on its own device."""
    assert not refusals(asked(**given))


def test_an_engine_without_its_package_or_device_refuses() -> None:
    """The message names the package and how it is installed; nothing falls back."""
    with pytest.raises(Unsupported, match="runs on hpu, not on cpu"):
        engines.engine_function("optimum-habana", "generate", "cpu")
    for name, device in (("optimum-habana", "hpu"), ("vllm", "cuda"), ("vllm-gaudi", "hpu")):
        with pytest.raises(Unsupported, match="needs the package") as found:
            engines.engine_function(name, "generate", device)
        assert engines.find_engine(name).install in str(found.value)
    with pytest.raises(BadConfiguration, match=r"no engine 'tgi'\. There is: transformers"):
        engines.engine_function("tgi", "generate", "cpu")
    with pytest.raises(BadConfiguration, match="vllm does not train; transformers, optimum-habana"):
        engines.engine_function("vllm", "train", "cuda")


@pytest.mark.parametrize("name", engines.ENGINES)
def test_a_spec_holds_together(name) -> None:
    """What it says of devices is about its own, and what it names is there."""
    spec = engines.find_engine(name)
    assert spec.abilities and spec.packages and spec.summary and spec.install
    devices = {device for _, device in spec.precisions} | set(spec.modes)
    assert all(spec.runs_on(device) for device in devices)
    assert any(spec.runs_on(device) for device in DEVICES)
    assert not any(set(modes.names) & set(modes.lacking) for modes in spec.modes.values())
    assert set(spec.calibrations.values()) <= set(WORKLOADS)
    for ability in spec.abilities.values():
        module, _, function = ability.function.partition(":")
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_one_engine_is_the_default() -> None:
    """A workload's engine, where the grid names none, is the default if that can run it."""
    assert [spec.name for spec in engines.ENGINES.values() if spec.default] == ["transformers"]
    assert engines.default_engine() == engines.default_engine("train") == "transformers"
    assert engines.default_engine("calibrate") == "optimum-habana"
    assert engines.engines_for("train") == ("transformers", "optimum-habana")


def test_another_package_brings_an_engine(tmp_path) -> None:
    """One file and an entry point: it can be named in a grid, and does not replace one of ours."""
    spec = """\
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
    (tmp_path / "echo_spec.py").write_text(spec)
    (tmp_path / "echo-1.dist-info").mkdir()
    (tmp_path / "echo-1.dist-info" / "METADATA").write_text("Name: echo\nVersion: 1\n")
    (tmp_path / "echo-1.dist-info" / "entry_points.txt").write_text(
        "[nightgrid.engines]\necho = echo_spec:ECHO\nvllm = echo_spec:OURS\n"
    )
    code = (
        "from workloads.engines import ENGINES\nfrom workloads.registry import WORKLOADS\n"
        "print(*WORKLOADS['text-generation'].engines, *WORKLOADS['finetuning'].engines)\n"
        "print(ENGINES['vllm'].devices, WORKLOADS['text-generation'].takes_engine('echo'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    generating, training = engines.engines_for("generate"), engines.engines_for("train")
    ours = " ".join([*generating, "echo", *training])
    assert done.stdout.splitlines() == [ours, "('cuda', 'cpu') True"]


# ---------------------------------------------------------------- fp8 and 4 bits on Gaudi


def test_four_bits_are_taken_from_a_checkpoint_that_has_them(tmp_path) -> None:
    """GPTQ, AWQ and AutoRound; a checkpoint in 16 bits is told in the plan."""

    def write(**config) -> JobDescription:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        (tmp_path / "model.safetensors").touch()
        return asked(model=str(tmp_path), precision="int4")

    for method in quantization.FOUR_BIT:
        quantized = {"quant_method": method, "bits": 4}
        assert not list(refusals(write(quantization_config=quantized)))
    (refusal,) = refusals(write())
    assert refusal.unsupported and "quantised already" in refusal.reason
    assert list(refusals(write(quantization_config={"quant_method": "gptq", "bits": 8})))
    with pytest.raises(Unsupported, match="pip install auto-round-hpu"):
        quantization.four_bit_arguments(
            {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "m"
        )


def test_a_calibration_belongs_to_model_cards_and_kind_of_card(tmp_path, monkeypatch) -> None:
    """Scales do not transfer: each of the three has files of its own."""
    monkeypatch.setenv("NIGHTGRID_CALIBRATIONS", str(tmp_path))
    places = {
        quantization.calibration_directory(model, cards, card)
        for model in ("org/a", "org/b")
        for cards in (1, 8)
        for card in ("GAUDI2", "GAUDI3")
    }
    assert len(places) == 8 and all(place.parent == tmp_path for place in places)


def test_fp8_asks_for_its_calibration(tmp_path) -> None:
    """Without one the message says where it was looked for, and what writes it."""
    with pytest.raises((DataMissing, ImportError), match=r"calibration|neural_compressor"):
        quantization.quantize(object(), job("fp8"), tmp_path)


def test_both_passes_name_the_same_files(tmp_path) -> None:
    """What measuring writes is what quantising reads."""
    measure = quantization.compressor_settings(tmp_path, measure=True)
    quantize = quantization.compressor_settings(tmp_path, measure=False)
    assert measure["mode"] == "MEASURE" and quantize["mode"] == "QUANTIZE"
    assert measure["dump_stats_path"] == quantize["dump_stats_path"]
    assert quantize["scale_method"] == "maxabs_hw" and "scale_method" not in measure


def test_a_cache_that_stays_in_bf16_is_not_quantised(tmp_path) -> None:
    """optimum-habana's ChatGLM makes its cache in bf16 whatever it is told; Llama's can be fp8."""

    def left_out(model_type: str) -> list[str]:
        settings = quantization.compressor_settings(tmp_path, measure=False, model_type=model_type)
        return settings["blocklist"]["types"]

    assert left_out("chatglm") == ["KVCache"] and left_out("llama") == []


def test_layers_are_packed_for_the_card_once() -> None:
    """Whether AutoRound did it already shows in the shape; other layers are left alone."""

    class Layer(torch.nn.Module):
        QUANT_TYPE = "hpu"
        infeatures = 64

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.qweight = torch.zeros(rows, 4, dtype=torch.int32)
            self.packed = 0

        def post_init(self) -> None:
            self.packed += 1
            self.qweight = torch.zeros(self.infeatures, 4, dtype=torch.int32)

    fresh, done = Layer(8), Layer(64)
    for _ in range(2):
        quantization.pack_for_the_card(torch.nn.Sequential(fresh, done, torch.nn.Linear(1, 1)))
    assert (fresh.packed, done.packed) == (1, 0)


@pytest.mark.parametrize(
    ("workload", "precision", "expected"),
    [
        ("text-generation", "bf16", ["load"]),
        ("text-generation", "fp8", ["inference mode", "load", "quantize"]),
        ("fp8-calibration", "bf16", ["inference mode", "load", "measure"]),
    ],
)
def test_the_bridge_knows_of_fp8_before_a_model_is_there(
    workload: str, precision: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that are made while it loads would lack the attribute of inference."""
    from workloads.engines.optimum_habana import generation

    steps: list[str] = []

    def step(name: str) -> Callable[..., object]:
        return lambda *_, **__: steps.append(name)

    task = SimpleNamespace(function=lambda _: step("load"))
    monkeypatch.setattr(generation, "load_config", lambda _: SimpleNamespace())
    monkeypatch.setattr(generation, "task_for", lambda *_: task)
    monkeypatch.setattr(quantization, "calibration_directory", lambda *_: "measured")
    monkeypatch.setattr(quantization, "quantize", step("quantize"))
    monkeypatch.setattr(quantization, "start_measuring", step("measure"))
    device = SimpleNamespace(
        before_quantized_loading=step("inference mode"), device_name=lambda: "GAUDI2"
    )
    asked_for = job(precision, workload=workload)
    generation.load_model(SimpleNamespace(entry=None), asked_for, device)  # type: ignore[arg-type]
    assert steps == expected
