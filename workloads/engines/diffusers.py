"""diffusers' own pipelines, which make images from texts."""

from __future__ import annotations

from workloads.base import Support, supported, unsupported
from workloads.engines.base import Ability, EngineSpec, Package

_LINEAR = (
    "on the linear layers of the denoiser, expanded to bf16 for each product; all else in bf16"
)


def _precisions() -> dict[tuple[str, str], Support]:
    eight_bits = {
        "int8": supported(
            f"torchao int8 weight-only, one scale per output channel, {_LINEAR}", "torchao"
        ),
        "fp8": supported(f"torchao float8 (e4m3) weight-only, {_LINEAR}", "torchao"),
    }
    found = {
        (precision, device): cell
        for device in ("cpu", "cuda")
        for precision, cell in eight_bits.items()
    }
    for device in ("cpu", "cuda", "hpu"):
        found["int4", device] = unsupported(
            "this version stores no part of a text-to-image pipeline in 4 bits"
        )
    for precision in eight_bits:
        found[precision, "hpu"] = unsupported(
            "torchao has no 8-bit kernels for Gaudi, and the Intel Neural Compressor is used for "
            "language models only"
        )
    return found


SPEC = EngineSpec(
    name="diffusers",
    summary="diffusers' own pipelines: Stable Diffusion and others, from texts to images.",
    needs="native_eager",
    abilities={
        "images": Ability(function="workloads.images.diffusers_engine:load", attentions=None)
    },
    install="pip install diffusers",
    packages=(Package(name="diffusers", module="diffusers"),),
    own_process=False,
    precisions=_precisions(),
)
