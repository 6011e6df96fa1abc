"""Engines: which there are, what they take, and what processes they need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workloads import engines
from workloads.api import MeasureSettings, Request
from workloads.devices import device_for
from workloads.engines import gaudi_quantization
from workloads.engines.rules import engine_refusals
from workloads.errors import BadConfiguration, DataMissing, Unsupported
from workloads.refusal import Asked

ROOT = Path(__file__).resolve().parents[2]


def asked(**given) -> Asked:
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
    return Asked(**(fields | given))


def request(engine: str, precision: str = "bf16") -> Request:
    return Request(
        workload="text-generation",
        model="tiny-chatglm3",
        dataset="advertisegen-synthetic",
        precision=precision,
        batch_size=1,
        engine=engine,
        residency_key="",
        parameters={},
        measure=MeasureSettings(),
    )


def test_no_engine_is_imported_to_know_them() -> None:
    """A plan asks for names, rules and kinds of process; torch is not loaded for that."""
    code = (
        "import sys\nfrom workloads import engines\nfrom workloads.engines import rules\n"
        "engines.process_kind('optimum-habana', 'hpu', {})\n"
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


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "cuda"}, "runs on hpu, not on cuda"),
        ({"engine": "vllm"}, "runs on cuda, not on hpu"),
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
    (refusal,) = engine_refusals(asked(**given))
    assert refusal.unsupported and reason in refusal.reason


@pytest.mark.parametrize("parameters", [{}, {"hpu_mode": "lazy"}, {"hpu_mode": "compile"}])
def test_what_an_engine_takes_is_not_refused(parameters) -> None:
    """Its own modes, on its own device."""
    assert not list(engine_refusals(asked(parameters=parameters)))
    assert not list(engine_refusals(asked(engine="transformers", device="cpu")))


def test_an_engine_without_its_package_or_device_refuses() -> None:
    """The message names the package and how it is installed; nothing falls back."""
    with pytest.raises(Unsupported, match=r"on Gaudi cards \(hpu\), not cpu"):
        engines.engine_loader("optimum-habana")(request("optimum-habana"), device_for("cpu"))
    with pytest.raises(Unsupported, match="pip install 'nightgrid"):
        engines.engine_loader("optimum-habana")(request("optimum-habana"), device_for("hpu"))
    for name in ("vllm", "vllm-gaudi"):
        with pytest.raises(Unsupported, match=f"pip install {name}"):
            engines.engine_loader(name)(request(name), device_for("cuda"))
    with pytest.raises(BadConfiguration, match=r"no engine 'tgi'\. There is: transformers"):
        engines.engine_loader("tgi")


# ---------------------------------------------------------------- fp8 and 4 bits on Gaudi


def test_four_bits_are_taken_from_a_checkpoint_that_has_them(tmp_path) -> None:
    """GPTQ, AWQ and AutoRound; a checkpoint in 16 bits is told in the plan."""

    def write(**config) -> Asked:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        (tmp_path / "model.safetensors").touch()
        return asked(model=str(tmp_path), precision="int4")

    for method in gaudi_quantization.FOUR_BIT:
        quantized = {"quant_method": method, "bits": 4}
        assert not list(engine_refusals(write(quantization_config=quantized)))
    (refusal,) = engine_refusals(write())
    assert refusal.unsupported and "quantised already" in refusal.reason
    assert list(engine_refusals(write(quantization_config={"quant_method": "gptq", "bits": 8})))
    with pytest.raises(Unsupported, match="pip install auto-round-hpu"):
        gaudi_quantization.four_bit_arguments(
            {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "m"
        )


def test_a_calibration_belongs_to_model_cards_and_kind_of_card(tmp_path, monkeypatch) -> None:
    """Scales do not transfer: each of the three has files of its own."""
    monkeypatch.setenv("NIGHTGRID_CALIBRATIONS", str(tmp_path))
    places = {
        gaudi_quantization.calibration_directory(model, cards, card)
        for model in ("org/a", "org/b")
        for cards in (1, 8)
        for card in ("GAUDI2", "GAUDI3")
    }
    assert len(places) == 8 and all(place.parent == tmp_path for place in places)


def test_fp8_asks_for_its_calibration(tmp_path) -> None:
    """Without one the message says where it was looked for, and what writes it."""
    with pytest.raises((DataMissing, ImportError), match=r"calibration|neural_compressor"):
        gaudi_quantization.quantize(object(), request("optimum-habana", "fp8"), tmp_path)


def test_both_passes_name_the_same_files(tmp_path) -> None:
    """What measuring writes is what quantising reads."""
    measure = gaudi_quantization.compressor_settings(tmp_path, measure=True)
    quantize = gaudi_quantization.compressor_settings(tmp_path, measure=False)
    assert measure["mode"] == "MEASURE" and quantize["mode"] == "QUANTIZE"
    assert measure["dump_stats_path"] == quantize["dump_stats_path"]
    assert quantize["scale_method"] == "maxabs_hw" and "scale_method" not in measure


def test_a_cache_that_stays_in_bf16_is_not_quantised(tmp_path) -> None:
    """optimum-habana's ChatGLM makes its cache in bf16 whatever it is told; Llama's can be fp8."""

    def left_out(model_type: str) -> list[str]:
        settings = gaudi_quantization.compressor_settings(
            tmp_path, measure=False, model_type=model_type
        )
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
        gaudi_quantization.pack_for_the_card(
            torch.nn.Sequential(fresh, done, torch.nn.Linear(1, 1))
        )
    assert (fresh.packed, done.packed) == (1, 0)
