"""vLLM on Gaudi cards, by its plugin vllm-gaudi."""

from __future__ import annotations

from workloads.engines.base import Ability, EngineSpec, Modes, Package
from workloads.engines.gaudi.settings import GaudiSettings
from workloads.engines.vllm import LOADER, QUANTIZED, VLLM
from workloads.support import unsupported

SPEC = EngineSpec(
    name="vllm-gaudi",
    summary="vLLM with Habana's plugin.",
    devices=("hpu",),
    abilities={"generate": Ability(function=LOADER, settings=GaudiSettings)},
    install="pip install vllm-gaudi",
    packages=(VLLM, Package(name="vllm-gaudi", module="vllm_gaudi")),
    counts_compilations=False,  # its engine core may run in a process of its own
    modes={
        "hpu": Modes(
            setting="hpu_mode",
            names=("eager", "compile"),
            lacking={"lazy": "does not cut graphs, which lazy mode collects"},
        )
    },
    precisions={
        (precision, "hpu"): unsupported(
            f"vllm-gaudi takes {precision} from checkpoints that are in it; this version has no "
            "adapter for them"
        )
        for precision in QUANTIZED
    },
)
