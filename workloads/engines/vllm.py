"""vLLM: continuous batching on NVIDIA cards."""

from __future__ import annotations

from workloads.engines.base import Ability, EngineSpec, Package
from workloads.support import unsupported

VLLM = Package(name="vllm", module="vllm")

#: Precisions that vLLM reads from checkpoints which are in them already.
QUANTIZED = ("fp8", "int8", "int4")

LOADER = "workloads.generation.vllm_engine:load"

SPEC = EngineSpec(
    name="vllm",
    summary="vLLM: continuous batching with paged attention.",
    devices=("cuda",),
    abilities={"generate": Ability(function=LOADER)},
    install="pip install vllm",
    packages=(VLLM,),
    counts_compilations=False,  # its engine core may run in a process of its own
    precisions={
        (precision, "cuda"): unsupported(
            f"vllm takes {precision} from checkpoints that are in it; this version has no adapter "
            "for them"
        )
        for precision in QUANTIZED
    },
)
