"""vLLM on Gaudi cards, by its plugin vllm-gaudi."""

from __future__ import annotations

from workloads.engines.base import Ability, EngineSpec, Modes, Package
from workloads.engines.gaudi.settings import GaudiSettings
from workloads.engines.vllm import LOADER, VLLM
from workloads.support import unsupported

SPEC = EngineSpec(
    name="vllm-gaudi",
    summary="vLLM with Habana's plugin.",
    devices=("hpu",),
    abilities={"generate": Ability(function=LOADER, tasks=("causal-lm",), settings=GaudiSettings)},
    install="take an image that has it, or build vLLM for the empty platform and vllm-gaudi from "
    "their sources (no package index has the plugin)",
    packages=(VLLM, Package(name="vllm-gaudi", module="vllm_gaudi")),
    own_loader=True,
    counts_compilations=False,  # its engine core may run in a process of its own
    modes={
        "hpu": Modes(
            setting="hpu_mode",
            names=("eager", "compile"),
            lacking={"lazy": "does not cut graphs, which lazy mode collects"},
        )
    },
    precisions={
        ("fp8", "hpu"): unsupported(
            "vllm-gaudi quantises to fp8 with a calibration by the Intel Neural Compressor, or "
            "reads checkpoints that are in it; this version asks for neither"
        ),
        ("int8", "hpu"): unsupported("vllm-gaudi quantises to fp8 and 4 bits, not to int8"),
        ("int4", "hpu"): unsupported(
            "vllm-gaudi reads 4 bits from checkpoints that are in them (GPTQ, AWQ); this version "
            "asks for none"
        ),
    },
)
