"""A loaded pipeline that paints batches and says how long each of its parts took.

The library's own ``__call__`` does all the work: text encoding, denoising step by step, decoding
and conversion, so that images are those that its user would get. What passes from one part to the
next is a method of the pipeline, and those methods are put into a clock. The card is waited for
between two parts, four times a batch; inside of the denoising loop it never is.

Latents are drawn on the CPU in fp32, each image's from a seed of its own, and only then get the
format of the weights: the same image whatever device, precision and batch it is painted in.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.devices.base import Device
from workloads.images.facts import DENOISERS
from workloads.images.loading import denoiser_name
from workloads.models import precision as precisions
from workloads.models import precision as weights
from workloads.models.precision import ModelWeights

#: With a U-Net, where a job names none: diffusers' and optimum-habana's default.
USUAL_GUIDANCE = 7.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Painted:
    """Images of one batch, and the seconds of each part; together they are the batch's."""

    images: Sequence[Any]  # PIL's
    text_encoding_s: float
    denoising_s: float
    decoding_s: float
    conversion_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePipeline:
    """A pipeline on its card, ready to paint."""

    pipeline: Any
    device: Device
    weights: ModelWeights
    random_weights: bool
    details: Mapping[str, str]
    figures: Mapping[str, float] = field(default_factory=dict)  # of its engine's ``metrics``
    clock: Callable[[], float]
    #: Arguments of every call that the library wants besides, from the number of texts.
    arguments: Callable[[int], Mapping[str, Any]] = lambda count: {}
    #: In which the library is called: it switches gradients off itself, and no more.
    mode: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    _moments: dict[str, float] = field(default_factory=dict)
    _seeds: list[int] = field(default_factory=list)  # of the batch that is painted

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        self._in_clock(pipeline, "encode_prompt", after="encoded")
        self._in_clock(pipeline.vae, "decode", before="denoised", after="decoded")
        pipeline.prepare_latents = drawn_by(pipeline.prepare_latents, self._seeds)

    def paint(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        steps: int,
        guidance: float | None,
        height: int | None,
        width: int | None,
    ) -> Painted:
        """Paint a batch: an image for each text, from the latents of its seed."""
        scale = self.guidance(guidance)
        asked = {"guidance_scale": scale} if scale is not None else {}
        if (height is None) != (width is None):  # the library would take its own for both
            height, width = height or own_side(self.pipeline), width or own_side(self.pipeline)
        self._seeds[:] = seeds
        self._moments.clear()
        began = self.clock()
        with self.mode():
            images = self.pipeline(
                prompt=list(prompts),
                num_inference_steps=steps,
                height=height,
                width=width,
                **asked,
                **self.arguments(len(prompts)),
            ).images
        self.wait()
        ended, moments = self.clock(), self._moments
        return Painted(
            images=images,
            text_encoding_s=moments["encoded"] - began,
            denoising_s=moments["denoised"] - moments["encoded"],
            decoding_s=moments["decoded"] - moments["denoised"],
            conversion_s=ended - moments["decoded"],
        )

    def guidance(self, asked: float | None) -> float | None:
        """The guidance scale of a job; None: that of the pipeline's makers."""
        usual = USUAL_GUIDANCE if denoiser_name(self.pipeline) == DENOISERS[0] else None
        return usual if asked is None else asked

    def wait(self) -> None:
        """Let the card do all that was queued."""
        self.device.mark_step()
        self.device.synchronize()

    def _in_clock(self, owner: Any, name: str, *, before: str = "", after: str) -> None:
        """Note the moments before and after a method of a part, with the card waited for."""
        method = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            if before:
                self.wait()
                self._moments.setdefault(before, self.clock())
            found = method(*given, **named)
            self.wait()
            self._moments[after] = self.clock()
            return found

        setattr(owner, name, timed)


def own_side(pipeline: Any) -> int:
    """Pixels on a side of the images that a pipeline paints unless it is told."""
    config = getattr(pipeline, denoiser_name(pipeline)).config
    found = getattr(pipeline, "default_sample_size", None) or config.sample_size
    side = found if isinstance(found, int) else found[0]
    return side * int(pipeline.vae_scale_factor)


def drawn_by(prepare_latents: Callable[..., Any], seeds: Sequence[int]) -> Callable[..., Any]:
    """A pipeline's ``prepare_latents`` that draws each image's on the CPU from its own seed, and in
    fp32 whatever format it is asked for: fewer bits would be other numbers, not rounded ones.

    Args:
        prepare_latents: of the pipeline.
        seeds: those of the batch, at the moment of the call.
    """
    import torch

    signature = inspect.signature(prepare_latents)

    def prepare(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        wanted = bound.arguments["dtype"]
        bound.arguments["dtype"] = torch.float32
        bound.arguments["generator"] = [torch.Generator("cpu").manual_seed(one) for one in seeds]
        drawn = prepare_latents(*bound.args, **bound.kwargs)
        if isinstance(drawn, tuple):  # with the places of the latents beside them
            return tuple(each.to(wanted) for each in drawn)
        return drawn.to(wanted)

    return prepare


def weights_of(pipeline: Any, precision: str, device: str, engine: str) -> ModelWeights:
    """Examine the weights of all parts: of a precision of 8 bits the denoiser has those of its
    linear layers in it, and everything else is in bf16.

    Raises:
        BadConfiguration: they are something else.
    """
    import torch

    parts = {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    }
    if not precisions.quantized(precision):
        return weights.inspect(torch.nn.ModuleDict(parts), precision, device)
    denoiser = weights.inspect(parts.pop(denoiser_name(pipeline)), precision, device, engine)
    others = weights.inspect(torch.nn.ModuleDict(parts), "bf16", device)
    count = denoiser.parameter_count + others.parameter_count
    share = denoiser.quantized_share * denoiser.parameter_count / count
    means = precisions.support(precision, device, engine).means
    return ModelWeights(
        weight_bytes=denoiser.weight_bytes + others.weight_bytes,
        parameter_count=count,
        quantized_share=share,
        detail=f"{means}; {share:.0%} of the parameters, the rest in bf16",
    )
