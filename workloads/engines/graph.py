"""Nightgrid's own decoding: one launch a step over a static cache, weights read as they are packed.

On NVIDIA cards a step is a CUDA graph; on a CPU the same step runs as plain torch or compiled,
which is how it is tested, not how a CPU is fast.
"""

from __future__ import annotations

from collections.abc import Iterator

from workloads.engines.base import Ability, EngineSpec, Package
from workloads.engines.transformers import CompileSettings
from workloads.refusal import Asked, Refusal
from workloads.support import Support, supported

#: How each format is stored.
_STORED = {
    "fp8": "float8 (e4m3) with one scale per output channel",
    "int8": "int8 with one scale per output channel",
    "int4": "4-bit integers with one scale for 64 weights of a row",
}


def _refuse(asked: Asked) -> Iterator[Refusal]:
    """The engine has an attention of its own, and reads the plain matrices once."""
    attention = asked.parameters.get("attention") or "sdpa"
    if attention != "sdpa":
        yield Refusal(
            setting="attention",
            reason=f"the engine graph has an attention of its own, not {attention}",
            hint="leave attention out",
            unsupported=True,
        )
    if asked.parameters.get("adapter"):
        yield Refusal(
            setting="adapter",
            reason="the engine graph puts on no adapters",
            hint="use the engine transformers",
            unsupported=True,
        )


def _precisions() -> dict[tuple[str, str], Support]:
    where = {
        "cuda": "products in bf16",
        "cpu": "expanded to bf16 for each product, so slower than bf16",
    }
    return {
        (precision, device): supported(f"{stored}; weights only, {products}")
        for device, products in where.items()
        for precision, stored in _STORED.items()
    }


SPEC = EngineSpec(
    name="graph",
    summary="Decoding by recorded steps over a static cache (CUDA graphs), packed weights.",
    devices=("cpu", "cuda"),
    abilities={
        "generate": Ability(
            function="workloads.decoding.engine:load",
            tasks=("causal-lm",),
            refuse=_refuse,
            settings=CompileSettings,
        )
    },
    install="pip install transformers",
    packages=(Package(name="transformers", module="transformers"),),
    own_process=False,
    opens_protected=True,
    features=frozenset({"continuous_batching"}),
    precisions=_precisions(),
)
