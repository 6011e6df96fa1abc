"""Engines: which there are and what processes they need; fp8 and 4 bits on Gaudi."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from workloads import engines
from workloads.base import BadConfiguration, Unsupported
from workloads.engines.optimum_habana import quantization
from workloads.registry import function_of

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
