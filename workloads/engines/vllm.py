"""vLLM: continuous batching on NVIDIA cards."""

from __future__ import annotations

from workloads.engines.base import Ability, EngineSpec, Package
from workloads.support import unsupported

VLLM = Package(name="vllm", module="vllm")

LOADER = "workloads.generation.vllm_engine:load"

SPEC = EngineSpec(
    name="vllm",
    summary="vLLM: continuous batching with paged attention.",
    devices=("cuda",),
    abilities={"generate": Ability(function=LOADER, tasks=("causal-lm",))},
    install="pip install vllm",
    packages=(VLLM,),
    own_loader=True,
    alone=True,
    counts_compilations=False,  # its engine core may run in a process of its own
    precisions={
        (precision, "cuda"): unsupported(f"{does}; this version asks for no quantisation of vLLM's")
        for precision, does in {
            "fp8": "vLLM quantises to fp8 while it loads, or reads checkpoints that are in it",
            "int8": "vLLM reads int8 from checkpoints that are in it",
            "int4": "vLLM quantises to 4 bits while it loads, or reads checkpoints in them",
        }.items()
    },
)
