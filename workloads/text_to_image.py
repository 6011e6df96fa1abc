"""Text to image: images per second of a diffusion pipeline, and where its time goes.

A pipeline encodes a text, draws noise (the latents), denoises it step by step with a U-Net or
transformer, and decodes it to pixels; with guidance above 1 the U-Net sees every image twice. All
four parts and the conversion to host images are timed.

A repeat is one batch. Image n of a job has text n of the dataset (cyclically) and the latents of
seed + n on any card, and goes to rank n mod world size.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from workloads.base import (
    NOT_FINITE,
    BadConfiguration,
    JobContext,
    JobDescription,
    MeasureSettings,
    Metric,
    Refusal,
    Request,
    Result,
    Sample,
    Throughput,
    Timed,
)
from workloads.bench.measure import Observation, load_resident, measure_resident
from workloads.bench.warmup import WarmupPlan
from workloads.data.datasets import DatasetParameters, load_dataset
from workloads.engines import engine_function
from workloads.engines.images import (
    DENOISERS,
    OWN_SCHEDULER,
    ImagePipeline,
    Painted,
    PipelineFacts,
    facts_of,
)
from workloads.models import attention
from workloads.registry import WorkloadSpec
from workloads.settings import amount, choice, neutral, work
from workloads.training.techniques import precision as matmul_precision


def _per_image(timed: Timed) -> float | None:
    """Cards over the throughput, which is the mean of batches' rates by the slowest card."""
    batches: dict[int, list[Sample]] = {}
    for sample in timed.samples:
        batches.setdefault(sample.repeat, []).append(sample)
    slowest = [(max(s.wall_s for s in batch), batch) for batch in batches.values()]
    rates = [sum(s.items for s in batch) / wall_s for wall_s, batch in slowest if wall_s > 0]
    if not any(rates):
        return None
    return max(map(len, batches.values())) * len(rates) / math.fsum(rates)


def _share(part: str, title: str, description: str) -> Metric:

    def figure(timed: Timed) -> float | None:
        parts = [(getattr(sample, f"{part}_s"), sample.wall_s) for sample in timed.samples]
        known = [(seconds, wall_s) for seconds, wall_s in parts if seconds is not None]
        wall_s = math.fsum(wall_s for _, wall_s in known)
        return math.fsum(seconds for seconds, _ in known) / wall_s if wall_s > 0 else None

    description = f"Share of the timed part in which {description}."
    return Metric(name=f"{part}_share", title=title, description=description, figure=figure)


METRICS = (
    Metric(
        name="seconds_per_image",
        title="per image",
        unit="s",
        description="Cards over the row's throughput: the inverse of a card's share of it at this "
        "batch size, not the wait for one image.",
        better="lower",
        figure=_per_image,
    ),
    _share("text_encoding", "text encoding", "texts were encoded"),
    _share("denoising", "denoising", "noise was removed from latents"),
    _share("decoding", "decoding", "latents were decoded to pixels"),
    _share("conversion", "conversion", "pixels became images of the host"),
)


#: Least number of pixels per latent on a side.
SIDE_MULTIPLE = 8


def refuse(asked: JobDescription) -> tuple[Refusal, ...]:
    """Objections to a job beyond those of its engine and model."""
    facts = facts_of(asked.model)
    of_model = () if facts is None else tuple(_of_pipeline(asked, facts))
    return (
        *_of_sizes(asked),
        *_of_batches(asked),
        *attention.refusals(asked),
        *matmul_precision.refusals(asked, "write precision: bf16 and leave matmul_precision out"),
        *of_model,
    )


def _of_sizes(asked: JobDescription) -> Iterator[Refusal]:
    for name in ("height", "width"):
        side = asked.parameters.get(name)
        if side is not None and side % SIDE_MULTIPLE:
            lower = side - side % SIDE_MULTIPLE
            yield Refusal(
                setting=name,
                reason=f"{side} is not divisible by {SIDE_MULTIPLE}, the pixels for each element "
                "of a latent",
                hint=f"write {max(lower, SIDE_MULTIPLE)} or {lower + SIDE_MULTIPLE}",
            )


def _of_batches(asked: JobDescription) -> Iterator[Refusal]:
    images, warmup = asked.parameters.get("images"), asked.parameters.get("warmup_batches") or 0
    if images is None or not isinstance(asked.batch_size, int):
        return
    per_batch = asked.batch_size * asked.cards
    if per_batch > images:
        cards = f" on {asked.cards} cards" if asked.cards > 1 else ""
        yield Refusal(
            setting="batch_size",
            reason=f"a batch of {asked.batch_size}{cards} is more than the {images} images of "
            "the job",
            hint=f"write images: {per_batch * (warmup + 3)} or more, or leave images out",
        )
        return
    batches = math.ceil(images / per_batch)
    if batches <= warmup:
        yield Refusal(
            setting="warmup_batches",
            reason=f"{images} images are {batches} batches of {per_batch}, and {warmup} of them "
            "are left out: nothing would be timed",
            hint=f"write images: {per_batch * (warmup + 1)} or more, or fewer warmup_batches",
        )


def _of_pipeline(asked: JobDescription, facts: PipelineFacts) -> Iterator[Refusal]:
    if not facts.reads_text or not facts.denoiser:
        lacks = "it has neither U-Net nor transformer" if facts.reads_text else "it reads no text"
        yield Refusal(
            setting="model",
            reason=f"{facts.class_name} makes no images from texts: {lacks}",
            hint="name a pipeline of Stable Diffusion, Stable Diffusion XL, PixArt or FLUX",
        )
        return
    scheduler = asked.parameters.get("scheduler") or OWN_SCHEDULER
    if facts.scheduler.startswith("FlowMatch") and scheduler != OWN_SCHEDULER:
        yield Refusal(
            setting="scheduler",
            reason=f"{facts.class_name} was trained for flow matching ({facts.scheduler}), which "
            f"{scheduler} does not do",
            hint="leave scheduler out",
        )
    if asked.parameters.get("guidance") is not None and not facts.guided:
        yield Refusal(
            setting="guidance",
            reason=f"this {facts.class_name} has no guidance: it was distilled without",
            hint="leave guidance out",
        )
    for name, wanted in (("channels_last", True), ("attention", "eager")):
        if asked.parameters.get(name) == wanted and facts.denoiser != DENOISERS[0]:
            yield Refusal(
                setting=name,
                reason=f"{facts.class_name} denoises by a transformer, and {name}: "
                f"{str(wanted).lower()} is about a U-Net",
                hint=f"leave {name} out",
            )


class TextToImageParameters(DatasetParameters):
    """Images from the texts of a dataset, by denoising latents step by step."""

    images: int | None = amount(
        None,
        description="How many images are made, all cards together and warm-up among them, in whole "
        "batches. Left out: warm-up, and as many batches as `measure` wants.",
    )
    warmup_batches: int = neutral(
        2,
        ge=0,
        description="Batches that are left out of the timed part, at least: graphs are compiled in "
        "them. measure.warmup: 0 leaves none out.",
    )
    steps: int = amount(50, description="Denoising steps of each image.")
    guidance: float | None = work(
        None,
        ge=0,
        description="Guidance scale. Above 1 a U-Net sees each image twice, with and without its "
        "text. Left out: 7.5 with a U-Net, else what the pipeline's makers chose.",
    )
    height: int | None = amount(
        None,
        ge=8,
        description="Pixels, a multiple of 8. Left out: the pipeline's own (512 for Stable "
        "Diffusion 1.5).",
    )
    width: int | None = amount(None, ge=8, description="As height. Left out: the pipeline's own.")
    scheduler: Literal["ddim", "pndm", "euler", "dpm-solver", "own"] | None = work(
        None,
        loads=True,
        description="How steps remove noise; own is the pipeline's. Left out: ddim with a U-Net, "
        "else own.",
    )
    seed: int = work(
        42,
        ge=0,
        le=2**32,
        description="Latents of image number n are drawn on the CPU, in fp32, from seed + n: the "
        "same on every device, in every precision and batch.",
    )
    attention: Literal["sdpa", "eager", "xformers"] = choice(
        "sdpa",
        loads=True,
        description="Attention of the denoiser: sdpa is PyTorch's scaled_dot_product_attention, "
        "eager plain matrix products, xformers the kernels of that package (CUDA only).",
    )
    channels_last: bool = choice(
        False,
        loads=True,
        description="Keep the channels of a pixel side by side (U-Net and decoder), as "
        "convolutions on tensor cores want them.",
    )
    torch_compile: bool = choice(
        False,
        loads=True,
        description="Compile the denoiser (torch.compile, Inductor). The time that takes is kept "
        "apart (compile_s).",
    )
    matmul_precision: Literal["highest", "high", "medium"] = choice(
        "highest",
        description="How exactly products and convolutions of fp32 numbers are computed: highest "
        "in fp32, high in TF32, medium in bf16 where the card can. For jobs in fp32.",
    )


SPEC = WorkloadSpec(
    name="text-to-image",
    function="workloads.text_to_image:run",
    parameters=TextToImageParameters,
    summary="Images from texts with a diffusion pipeline: images/s, seconds per image.",
    ability="images",
    tasks=("text-to-image",),
    dataset="image-prompts",
    throughput=Throughput(unit="images/s", counts="items"),
    metrics=METRICS,
    refuse=refuse,
)


#: Larger images are scaled down, since rows are read whole.
MOST_SIDE = 512


def png_of(image: Any) -> bytes:
    """PIL's image as PNG, at most ``MOST_SIDE`` pixels wide and high."""
    picture = image.convert("RGB")
    picture.thumbnail((MOST_SIDE, MOST_SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def one_colour(image: Any) -> bool:
    """Tell if all pixels are equal, as after numeric overflow."""
    return all(low == high for low, high in image.convert("RGB").getextrema())


#: Steps of a probe; more take no more memory.
_PROBE_STEPS = 2


def run(request: Request, context: JobContext) -> Result:
    """Measure text to image; see ``workloads.base.Workload``."""
    parameters = TextToImageParameters.model_validate(dict(request.parameters))
    if request.probe:
        parameters = parameters.model_copy(
            update={"steps": _PROBE_STEPS, "images": None, "warmup_batches": 0}
        )
    settings, plan = _timing(request, parameters, context.world_size)
    context.device.seed(0)
    context.enter_phase("load")
    load = engine_function(request.engine, "images", context.device.name)
    resident, load_s = load_resident(request, context, load)
    pipeline: ImagePipeline = resident.engine
    products = _set_products(parameters.matmul_precision, context)
    dataset = load_dataset(request.dataset, parameters.reading())
    texts = [example.content for example in dataset.examples]
    context.device.release_memory()
    context.device.reset_peak_memory()
    painting = Painting(pipeline, request.batch_size, parameters, texts, context)
    compile_s = painting.compile() if parameters.torch_compile else 0.0
    _, result = measure_resident(resident, context, painting.run_batch, 1, settings, plan=plan)
    first = painting.first
    scale = pipeline.guidance(parameters.guidance)
    details = {
        **result.details,
        **dataset.details,
        **products,
        "guidance": "the pipeline's own" if scale is None else f"{scale:g}",
        "inside_the_clock": "text encoding, denoising, decoding, conversion",
        "safety_checker": "none",
    }
    if first is not None:
        details["size"] = f"{first.width}x{first.height}"
        if one_colour(first):
            flag = "the first image is of one colour: numbers may have overflowed"
            details |= {"image_flag": flag, NOT_FINITE: flag}
    return replace(
        result,
        load_s=load_s,
        compile_s=compile_s,
        synthetic_data=dataset.synthetic,
        image=png_of(first) if first is not None else None,
        details=details,
    )


def _timing(
    request: Request, parameters: TextToImageParameters, cards: int
) -> tuple[MeasureSettings, WarmupPlan]:
    """Stopping rules and warm-up plan; BadConfiguration if no batch would be timed."""
    settings = request.measure
    left_out = max(settings.warmup, parameters.warmup_batches) if settings.warmup else 0
    plan = WarmupPlan(
        shapes=(request.batch_size,), passes=left_out, restarts=parameters.images is None
    )
    if parameters.images is None:
        return settings, plan
    batches = math.ceil(parameters.images / (request.batch_size * cards))
    if batches <= left_out:
        raise BadConfiguration(
            f"{parameters.images} images are {batches} batches, and {left_out} of them are left "
            "out: nothing would be timed"
        )
    timed = batches - left_out
    return replace(settings, min_repeats=timed, max_repeats=timed, least_s=0.0), plan


def _set_products(precision: str, context: JobContext) -> dict[str, str]:
    import torch

    torch.backends.cudnn.allow_tf32 = precision != "highest"  # torch's default allows it
    if precision == "highest":
        return {}
    return {"matmul_precision": matmul_precision.in_force(precision, context.device)}


@dataclass(slots=True)
class Painting:
    """Paints the batches of a rank, and keeps the first image of the job."""

    pipeline: ImagePipeline
    batch_size: int
    parameters: TextToImageParameters
    texts: list[str]
    context: JobContext
    first: Any = None  # PIL's image number 0; None on all ranks but its own

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        """Paint the batch of a repeat; return a function that makes its observation."""
        numbers, painted = self._paint(repeat, self.parameters.steps)

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
        """Run two steps of the batch's shape to compile them; return the seconds."""
        self.context.enter_phase("compile")
        began = self.context.clock()
        self._paint(0, _PROBE_STEPS)
        return self.context.clock() - began

    def _paint(self, repeat: int, steps: int) -> tuple[list[int], Painted]:
        places = range(repeat * self.batch_size, (repeat + 1) * self.batch_size)
        numbers = [place * self.context.world_size + self.context.rank for place in places]
        painted = self.pipeline.paint(
            [self.texts[number % len(self.texts)] for number in numbers],
            [self.parameters.seed + number for number in numbers],
            steps=steps,
            guidance=self.parameters.guidance,
            height=self.parameters.height,
            width=self.parameters.width,
        )
        return numbers, painted
