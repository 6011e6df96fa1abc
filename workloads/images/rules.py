"""Rules of text-to-image: which jobs make sense, and which run on a device. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator

from workloads import attention_packages
from workloads.base import JobDescription, Refusal
from workloads.images.facts import PipelineFacts, facts_of
from workloads.training.techniques import precision

#: An image has so many pixels on a side for each of a latent's, at least.
SIDE_MULTIPLE = 8
OWN_SCHEDULER = "own"


def refuse(asked: JobDescription) -> tuple[Refusal, ...]:
    """All that speaks against a job, beside its engine and its model."""
    facts = facts_of(asked.model)
    of_model = () if facts is None else tuple(_of_pipeline(asked, facts))
    return (
        *_of_sizes(asked),
        *_of_batches(asked),
        *attention_packages.refusals(asked),
        *precision.refusals(asked, "write precision: bf16 and leave matmul_precision out"),
        *of_model,
    )


def whole_batches(images: int, per_batch: int) -> int:
    """Batches in which so many images are made: the last one is filled up."""
    return -(-images // per_batch)


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
    batches = whole_batches(images, per_batch)
    if batches <= warmup:
        yield Refusal(
            setting="warmup_batches",
            reason=f"{images} images are {batches} batches of {per_batch}, and {warmup} of them "
            "are left out: nothing would be timed",
            hint=f"write images: {per_batch * (warmup + 1)} or more, or fewer warmup_batches",
        )


def _of_pipeline(asked: JobDescription, facts: PipelineFacts) -> Iterator[Refusal]:
    if not facts.reads_text or not facts.denoiser:
        lacks = (
            "it reads no text"
            if not facts.reads_text
            else "it has neither U-Net nor " + ("transformer")
        )
        yield Refusal(
            setting="model",
            reason=f"{facts.class_name} makes no images from texts: {lacks}",
            hint="name a pipeline of Stable Diffusion, Stable Diffusion XL, PixArt or FLUX",
        )
        return
    scheduler = asked.parameters.get("scheduler") or OWN_SCHEDULER
    if facts.flow_matching and scheduler != OWN_SCHEDULER:
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
        if asked.parameters.get(name) == wanted and facts.denoiser != DENOISER_OF_IMAGES:
            yield Refusal(
                setting=name,
                reason=f"{facts.class_name} denoises by a transformer, and {name}: "
                f"{str(wanted).lower()} is about a U-Net",
                hint=f"leave {name} out",
            )


#: The denoiser whose inputs are laid out as images.
DENOISER_OF_IMAGES = "unet"
