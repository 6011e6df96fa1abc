"""vLLM on Gaudi cards, by its plugin vllm-gaudi.

Written after the sources of vLLM 0.26.0 and vllm-gaudi 0.26.0. vLLM starts its engine core in
another process unless it is told not to, and only one process can hold a card, which is ours.
"""

from __future__ import annotations

from workloads.base import supported, unsupported
from workloads.engines.base import Ability, EngineSpec, Modes, Package
from workloads.engines.gaudi.settings import GaudiSettings
from workloads.engines.vllm import IN_PROCESS, VLLM, refuse_in_process

_REPLACED = "vllm-gaudi computes in bf16 whatever it is asked for (a line of its log says so)"

SPEC = EngineSpec(
    name="vllm-gaudi",
    summary="vLLM with Habana's plugin: continuous batching in buckets that are compiled first.",
    devices=("hpu",),
    abilities={
        "generate": Ability(
            function="workloads.generation.vllm_gaudi_engine:load",
            tasks=("causal-lm",),
            refuse=refuse_in_process,
            settings=GaudiSettings,
        )
    },
    install="take the image of clusters/gaudi-vllm.Dockerfile, or build vLLM for the empty "
    "platform and vllm-gaudi from their sources (no package index has the plugin)",
    packages=(VLLM, Package(name="vllm-gaudi", module="vllm_gaudi")),
    preferred={"hpu": 2},
    own_loader=True,
    alone=True,
    variables={
        **IN_PROCESS,
        "PT_HPU_WEIGHT_SHARING": "0",  # as the plugin sets it, which comes after our imports
    },
    modes={
        "hpu": Modes(
            setting="hpu_mode",
            names=("compile", "eager"),
            lacking={"lazy": "does not cut graphs, which lazy mode collects"},
        )
    },
    precisions={
        ("bf16", "hpu"): supported(
            "bfloat16 weights, products and key/value cache, in blocks of 128 tokens"
        ),
        ("fp16", "hpu"): unsupported(f"{_REPLACED}; write bf16"),
        ("fp32", "hpu"): unsupported(f"{_REPLACED}; write bf16"),
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
