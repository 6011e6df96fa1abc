"""Nightgrid's own decoding: one launch a step over a static cache, with packed weights.

    description        a decoder's matrices and constants, read off a model of transformers
    decoder            slots (keys, values and state of each row), prefill, recorded steps
    single_row         a single row's step as five Triton kernels a layer
    few_rows           several rows times a packed matrix, by Triton
    continuous         continuous batching over the slots; texts may come from any thread
    server             the same behind OpenAI's protocol, as a process of its own

A step is a CUDA graph on NVIDIA cards and compiled by the bridge on Gaudi cards (not run yet); on a
CPU it is plain or compiled torch, for tests rather than speed.
"""

from __future__ import annotations

from collections.abc import Iterator

from workloads.base import JobDescription, Refusal, Support, supported, unsupported
from workloads.devices import device_spec
from workloads.engines.base import (
    Ability,
    CompileSettings,
    EngineSpec,
    GaudiSettings,
    Modes,
    Package,
)

_STORED = {
    "fp8": "float8 (e4m3) with one scale per output channel",
    "int8": "int8 with one scale per output channel",
    "int4": "4-bit integers with one scale for 64 weights of a row",
}


class StepSettings(GaudiSettings, CompileSettings):
    """Settings of how a step runs."""


def _refuse(job: JobDescription) -> Iterator[Refusal]:
    """Refuse ``torch_compile`` where steps are always compiled."""
    device = device_spec(job.device)
    always = device.can("graphs") or not device.can("dynamic_shapes")
    if job.parameters.get("torch_compile") and always:
        yield Refusal(
            setting="torch_compile",
            reason=f"on {device.title} the engine graph compiles its step always",
            hint="leave torch_compile out",
            unsupported=True,
        )


def _precisions() -> dict[tuple[str, str], Support]:
    where = {
        "cuda": "products in bf16",
        "cpu": "expanded to bf16 for each product, so slower than bf16",
    }
    packed = {
        (precision, device): supported(f"{stored}; weights only, {products}")
        for device, products in where.items()
        for precision, stored in _STORED.items()
    }
    reason = "no kernel of the engine graph reads packed weights on Gaudi cards"
    return packed | {(precision, "hpu"): unsupported(reason) for precision in _STORED}


SPEC = EngineSpec(
    name="graph",
    summary="Decoding by recorded steps over a static cache (CUDA graphs), packed weights.",
    devices=("cpu", "cuda", "hpu"),
    abilities={
        "generate": Ability(
            function="workloads.engines.graph.engine:load",
            tasks=("causal-lm",),
            refuse=_refuse,
            settings=StepSettings,
        )
    },
    install="pip install transformers",
    packages=(Package(name="transformers", module="transformers"),),
    own_process=False,
    opens_protected=True,
    features=frozenset({"continuous_batching"}),
    modes={
        "hpu": Modes(
            setting="hpu_mode",
            names=("compile",),
            lacking={
                "lazy": "hands torch's graphs of a step to the card",
                "eager": "hands torch's graphs of a step to the card",
            },
        )
    },
    precisions=_precisions(),
)
