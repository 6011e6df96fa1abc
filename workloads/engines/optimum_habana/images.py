"""optimum-habana's diffusion pipelines on a Gaudi card, timed here, one batch a call: the library's
own timing does not wait for the card."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines.images import ImagePipeline, denoiser_name, set_scheduler, weights_of
from workloads.engines.optimum_habana import SPEC, prepare
from workloads.models import precision as precisions
from workloads.models.loading import open_model
from workloads.registry import task_for

if TYPE_CHECKING:
    from workloads.devices.hpu import HpuDevice

_PREFIX = "Gaudi"  # of diffusers' class names


def load(request: Request, device: Device) -> ImagePipeline:
    """Load ``request.model`` in ``request.precision`` onto the card.

    Raises:
        DataMissing: the pipeline is missing or incomplete.
        Unsupported: the library has no such pipeline, or the process has another mode.
    """
    version = prepare(device)
    hpu: HpuDevice = device  # type: ignore[assignment]  # prepare() takes no other
    precisions.require(request.precision, device.name, SPEC.name)
    mode = SPEC.mode(device.name, request.settings)
    if hpu.lazy() != (mode == SPEC.modes[device.name].names[0]):
        raise Unsupported(f"hpu_mode {mode}: this process was started in another one")
    from optimum.habana import GaudiConfig
    from optimum.habana import diffusers as gaudi_diffusers

    source = open_model(request.model)
    kind = getattr(gaudi_diffusers, _PREFIX + source.entry.architecture, None)
    if kind is None:
        raise Unsupported(f"optimum-habana {version} has no {source.entry.architecture}")
    graphs = hpu.lazy() and bool(request.settings.get("hpu_graphs", True))
    load_pipeline = task_for(request.workload, source.entry).function("load")
    with _stock_text_encoder():
        pipeline = load_pipeline(
            source,
            kind=kind,
            torch_dtype=precisions.compute_dtype(request.precision),
            use_habana=True,
            use_hpu_graphs=graphs,
            gaudi_config=GaudiConfig(use_torch_autocast=False),
            sdp_on_bf16=request.precision == "bf16",
            log_level=logging.ERROR,
        )
    scheduler = set_scheduler(
        pipeline, request.parameters.get("scheduler"), gaudi_diffusers, _PREFIX
    )
    return ImagePipeline(
        pipeline=pipeline,
        device=device,
        weights=weights_of(pipeline, request.precision, device.name, SPEC.name),
        random_weights=source.random_weights,
        details={
            "pipeline": type(pipeline).__name__,
            "denoiser": type(getattr(pipeline, denoiser_name(pipeline))).__name__,
            "scheduler": scheduler,
            "attention": "sdpa",
            "hpu_mode": mode,
            "hpu_graphs": "yes" if graphs else "no",
            "optimum_habana": version,
        },
        clock=time.perf_counter,
        arguments=_arguments,
    )


@contextlib.contextmanager
def _stock_text_encoder() -> Iterator[None]:
    """Use transformers' own CLIP in the block: the library's (1.21.2) fails on texts, adding a mask
    [batch, 1, length, length] to weights [batch * heads, length, length]."""
    from transformers.models.clip import modeling_clip

    own = modeling_clip.__name__
    replaced = {
        name: kind
        for name, kind in vars(modeling_clip).items()
        if isinstance(kind, type) and kind.__module__.startswith("optimum.")
    }
    for name, kind in replaced.items():
        setattr(modeling_clip, name, next(one for one in kind.__mro__ if one.__module__ == own))
    try:
        yield
    finally:
        for name, kind in replaced.items():
            setattr(modeling_clip, name, kind)


def _arguments(count: int) -> dict[str, Any]:
    """Arguments for one batch a call."""
    return {"batch_size": count, "throughput_warmup_steps": 0}
