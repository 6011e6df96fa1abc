"""diffusers' own pipelines, which make images from texts."""

from __future__ import annotations

from typing import Any

from workloads.base import Request, Unsupported, require_package, supported, unsupported
from workloads.devices.base import Device
from workloads.engines.base import Ability, EngineSpec, Package
from workloads.engines.images import (
    DENOISERS,
    ImagePipeline,
    denoiser_name,
    set_scheduler,
    weights_of,
)
from workloads.models import precision as precisions
from workloads.models.loading import open_model
from workloads.registry import task_for

_LINEAR = (
    "on the linear layers of the denoiser, expanded to bf16 for each product; all else in bf16"
)


_NO_KERNELS = (
    "torchao has no 8-bit kernels for Gaudi, and the Intel Neural Compressor is used for language "
    "models only"
)
_EIGHT_BITS = {
    "int8": f"torchao int8 weight-only, one scale per output channel, {_LINEAR}",
    "fp8": f"torchao float8 (e4m3) weight-only, {_LINEAR}",
}
_NO_FOUR_BITS = unsupported("this version stores no part of a text-to-image pipeline in 4 bits")

SPEC = EngineSpec(
    name="diffusers",
    summary="diffusers' own pipelines: Stable Diffusion and others, from texts to images.",
    needs="native_eager",
    abilities={"images": Ability(function="workloads.engines.diffusers:load", attentions=None)},
    install="pip install diffusers",
    packages=(Package(name="diffusers", module="diffusers"),),
    own_process=False,
    precisions={
        **{
            (name, device): supported(means, "torchao")
            for device in ("cpu", "cuda")
            for name, means in _EIGHT_BITS.items()
        },
        **{(name, "hpu"): unsupported(_NO_KERNELS) for name in _EIGHT_BITS},
        **{("int4", device): _NO_FOUR_BITS for device in ("cpu", "cuda", "hpu")},
    },
)


def load(request: Request, device: Device) -> ImagePipeline:
    """Load ``request.model`` in ``request.precision`` onto the card; Unsupported if this device
    lacks the precision, attention or compilation."""
    import diffusers
    import torch

    precisions.require(request.precision, device.name, request.engine)
    if lacking := device.lacks(request.precision):
        raise Unsupported(f"{request.precision}: {lacking}")
    source = open_model(request.model)
    settings = request.parameters
    pipeline = task_for(request.workload, source.entry).function("load")(
        source, torch_dtype=precisions.compute_dtype(request.precision)
    )
    pipeline.to(device.torch_device)
    name = denoiser_name(pipeline)
    denoiser = getattr(pipeline, name)
    scheduler = set_scheduler(pipeline, settings.get("scheduler"), diffusers)
    if precisions.quantized(request.precision):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        # Linear layers, not convolutions, in place.
        configurations = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}
        quantize_(denoiser, configurations[request.precision]())
    weights = weights_of(pipeline, request.precision, device.name, request.engine)
    details = {
        "pipeline": type(pipeline).__name__,
        "denoiser": type(denoiser).__name__,
        "scheduler": scheduler,
        "attention": _set_attention(denoiser, str(settings.get("attention") or "sdpa")),
    }
    if settings.get("channels_last"):
        for part in (DENOISERS[0], "vae"):
            getattr(pipeline, part).to(memory_format=torch.channels_last)
        details["memory_format"] = "channels last"
    if settings.get("torch_compile"):
        if lacking := device.cannot_compile():
            raise Unsupported(f"torch.compile: {lacking}")
        denoiser.compile(backend=device.compile_backend)
        details["compiled"] = name
    return ImagePipeline(
        pipeline=pipeline,
        device=device,
        weights=weights,
        random_weights=source.random_weights,
        details=details,
        mode=torch.inference_mode,  # no view tracking: saves 6 to 9% of the host's time
    )


def _set_attention(denoiser: Any, attention: str) -> str:
    if attention == "eager":
        from diffusers.models.attention_processor import AttnProcessor

        denoiser.set_attn_processor(AttnProcessor())
    elif attention == "xformers":
        require_package("xformers", "attention xformers")
        denoiser.enable_xformers_memory_efficient_attention()
    return attention
