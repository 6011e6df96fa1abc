"""Text to image: how fast a diffusion pipeline paints, and where its time goes.

A pipeline encodes a text, draws a small image of noise (the latents), lets a U-Net or transformer
remove a part of the noise again and again, and decodes what is left to pixels. With guidance above
1 the U-Net sees every image twice. A batch takes about as long as its images one after the other,
but for what the card can do side by side; so seconds per image (the inverse of throughput at that
batch size, which others call latency) say how well it is used.

A repeat is one batch. Its images are numbered on: number n of a job has the text n of the dataset
(from its start again where that is shorter) and the latents of seed + n, whichever card paints it.
On several cards they are dealt out in turn: n goes to rank n mod world size. Within the clock are
text encoding, denoising, decoding and conversion to images of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workloads.base import BadConfiguration, JobContext, MeasureSettings, Request, Result
from workloads.bench.measure import Observation, instruments_of, measure
from workloads.bench.warmup import WarmupPlan
from workloads.devices.monitor.host import HostMemoryPeak, resident_bytes
from workloads.engines import engine_function
from workloads.engines.base import figures_of
from workloads.images.pipeline import ImagePipeline
from workloads.images.png import one_colour, png_of
from workloads.images.rules import whole_batches
from workloads.workloads.text_to_image import TextToImageParameters

#: Of a probe: they take as much memory as all of them.
_PROBE_STEPS = 2


def run(request: Request, context: JobContext) -> Result:
    """Measure text to image; see ``workloads.base.Workload``."""
    from workloads.data.datasets import load_dataset

    parameters = TextToImageParameters.model_validate(dict(request.parameters))
    if request.batch_size < 1:
        raise BadConfiguration(f"batch size {request.batch_size}; at least 1 is needed")
    if request.probe:
        parameters = parameters.model_copy(
            update={"steps": _PROBE_STEPS, "images": None, "warmup_batches": 0}
        )
    settings, plan = _timing(request, parameters, context.world_size)
    context.device.seed(0)
    context.enter_phase("load")
    pipeline, baseline, load_s = resident_pipeline(request, context)
    products = _set_products(parameters.matmul_precision, context)
    dataset = load_dataset(request.dataset, parameters.reading())
    texts = [example.content for example in dataset.examples]
    context.device.release_memory()
    context.device.reset_peak_memory()
    painting = Painting(pipeline, request.batch_size, parameters, texts, context)
    compile_s = painting.compile() if parameters.torch_compile else 0.0
    with HostMemoryPeak() as host_memory:
        measured = measure(painting.run_batch, 1, settings, instruments_of(context), plan)
    first = painting.first
    scale = pipeline.guidance(parameters.guidance)
    details = {
        **pipeline.details,
        **products,
        **measured.details,
        "guidance": "the pipeline's own" if scale is None else f"{scale:g}",
        "inside_the_clock": "text encoding, denoising, decoding, conversion",
        "safety_checker": "none",
        "host_memory_peak": host_memory.method,
    }
    if first is not None:
        details["size"] = f"{first.width}x{first.height}"
        if one_colour(first):
            details["image_flag"] = "the first image is of one colour: numbers may have overflowed"
    return Result(
        samples=measured.samples,
        stop_reason=measured.stop_reason,
        load_s=load_s,
        compile_s=compile_s,
        **measured.warmup,
        weight_bytes=pipeline.weights.weight_bytes,
        parameter_count=pipeline.weights.parameter_count,
        baseline_host_memory_bytes=baseline,
        peak_host_memory_bytes=host_memory.bytes,
        peak_device_memory_bytes=context.device.peak_memory_bytes(),
        random_weights=pipeline.random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=pipeline.weights.detail,
        image=png_of(first) if first is not None else None,
        metrics=figures_of(pipeline),
        details=details,
    )


def numbers_of(repeat: int, batch_size: int, rank: int, world_size: int) -> list[int]:
    """The numbers of the images that a rank paints in a repeat."""
    first = repeat * batch_size
    return [place * world_size + rank for place in range(first, first + batch_size)]


def _timing(
    request: Request, parameters: TextToImageParameters, cards: int
) -> tuple[MeasureSettings, WarmupPlan]:
    """The rules of stopping, and the number of batches that are left out.

    Raises:
        BadConfiguration: none would be left to be timed.
    """
    settings = request.measure
    left_out = max(settings.warmup, parameters.warmup_batches) if settings.warmup else 0
    plan = WarmupPlan(
        shapes=(request.batch_size,), passes=left_out, restarts=parameters.images is None
    )
    if parameters.images is None:
        return settings, plan
    batches = whole_batches(parameters.images, request.batch_size * cards)
    if batches <= left_out:
        raise BadConfiguration(
            f"{parameters.images} images are {batches} batches, and {left_out} of them are left "
            "out: nothing would be timed"
        )
    timed = batches - left_out
    return replace(settings, min_repeats=timed, max_repeats=timed, least_s=0.0), plan


def resident_pipeline(request: Request, context: JobContext) -> tuple[ImagePipeline, int, float]:
    """The loaded pipeline, the host memory in use before it, and how long loading took: 0 when it
    was there already."""
    load = engine_function(request.engine, "images", context.device.name)
    took: list[float] = []

    def loader() -> tuple[ImagePipeline, int]:
        context.device.release_memory()
        baseline = resident_bytes()
        began = context.clock()
        pipeline = load(request, context.device)
        context.device.synchronize()
        took.append(context.clock() - began)
        return pipeline, baseline

    pipeline, baseline = context.resident(request.residency_key, loader)
    return pipeline, baseline, took[0] if took else 0.0


def _set_products(precision: str, context: JobContext) -> dict[str, str]:
    """Put the precision of fp32 products and convolutions in force; what rows say of it."""
    import torch

    torch.backends.cudnn.allow_tf32 = precision != "highest"  # torch allows it unless told
    if precision == "highest":
        return {}
    from workloads.training.techniques.precision import in_force

    return {"matmul_precision": in_force(precision, context.device)}


class Painting:
    """Paints the batches of a rank, and keeps the first image of the job."""

    def __init__(
        self,
        pipeline: ImagePipeline,
        batch_size: int,
        parameters: TextToImageParameters,
        texts: list[str],
        context: JobContext,
    ) -> None:
        self.first: Any = None  # PIL's image number 0; None on all ranks but its own
        self._pipeline = pipeline
        self._batch_size = batch_size
        self._parameters = parameters
        self._texts = texts
        self._context = context

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        """Paint the batch of a repeat; the returned function tells of it."""
        context, seed = self._context, self._parameters.seed
        numbers = numbers_of(repeat, self._batch_size, context.rank, context.world_size)
        painted = self._pipeline.paint(
            [self._texts[number % len(self._texts)] for number in numbers],
            [seed + number for number in numbers],
            steps=self._parameters.steps,
            guidance=self._parameters.guidance,
            height=self._parameters.height,
            width=self._parameters.width,
        )

        def observe() -> Observation:
            if numbers[0] == 0:
                self.first = painted.images[0]
            return Observation(
                items=len(painted.images),
                text_encoding_s=painted.text_encoding_s,
                denoising_s=painted.denoising_s,
                decoding_s=painted.decoding_s,
                conversion_s=painted.conversion_s,
            )

        return observe

    def compile(self) -> float:
        """Meet the batch's shape in two steps, so that nothing is left to compile; the seconds."""
        self._context.enter_phase("compile")
        began = self._context.clock()
        short = self._parameters.model_copy(update={"steps": _PROBE_STEPS})
        once = Painting(self._pipeline, self._batch_size, short, self._texts, self._context)
        once.run_batch(0, 0)
        return self._context.clock() - began
