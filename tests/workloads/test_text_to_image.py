"""Text to image on the embedded pipeline: what is painted, what is timed, what the row keeps."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from generation_cases import Worker, request
from PIL import Image
from safetensors.torch import load_file, save_file

from orchestrator.analysis import samples
from workloads import text_to_image
from workloads.base import BadConfiguration, DataMissing, MeasureSettings, Request, Result, Timed
from workloads.bench.measure import load_resident
from workloads.data.embedded import IMAGE_PROMPTS
from workloads.engines import engine_function
from workloads.engines.images import load_pipeline
from workloads.models.loading import open_model
from workloads.registry import metrics_of
from workloads.text_to_image import (
    MOST_SIDE,
    Painting,
    TextToImageParameters,
    one_colour,
    png_of,
)

pytestmark = pytest.mark.slow  # a pipeline paints for all of them

MODEL = "tiny-stable-diffusion"
STEPS = 4
SHORT = MeasureSettings(warmup=0, min_repeats=1, max_repeats=1, time_limit_s=600)


def job(**changes: Any) -> Request:
    usual = {
        "workload": "text-to-image",
        "model": MODEL,
        "engine": "diffusers",
        "measure": SHORT,
        "steps": STEPS,
    }
    made = request("image-prompts", **{**usual, **changes})
    settings = {**made.parameters, "precision": made.precision}
    return replace(made, residency_key=repr(sorted(settings.items())))


def run(worker: Worker, **changes: Any) -> Result:
    return text_to_image.run(job(**changes), worker.context())


def pixels(image: Any) -> numpy.ndarray:
    opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    return numpy.asarray(opened, dtype=float)


def difference(one: Any, other: Any) -> float:
    return float(numpy.abs(pixels(one) - pixels(other)).mean())


@pytest.fixture(scope="module")
def base(worker: Worker) -> Result:
    measure = replace(SHORT, warmup=1, min_repeats=2, max_repeats=2, relative_half_width=1e-9)
    return run(worker, measure=measure, warmup_batches=1)


@pytest.fixture(scope="module")
def stock() -> list[Any]:
    """The first four images of diffusers' own pipeline, in batches of two."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(open_model(MODEL).path, safety_checker=None)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    found: list[Any] = []
    for first in (0, 2):
        draw = [torch.Generator().manual_seed(42 + first + number) for number in range(2)]
        texts = list(IMAGE_PROMPTS[first : first + 2])
        found += pipeline(texts, num_inference_steps=STEPS, generator=draw).images
    return found


def painted(
    worker: Worker, batch_size: int, repeats: int, rank: int = 0, cards: int = 1
) -> list[Any]:
    context = replace(worker.context(), rank=rank, world_size=cards)
    load = engine_function("diffusers", "images", "cpu")
    resident, _ = load_resident(job(), context, load)
    found: list[Any] = []
    paint = resident.engine.paint

    class Kept:
        def paint(self, *given: Any, **named: Any) -> Any:
            made = paint(*given, **named)
            found.extend(made.images)
            return made

    parameters = TextToImageParameters(steps=STEPS)
    painting = Painting(Kept(), batch_size, parameters, list(IMAGE_PROMPTS), context)
    for repeat in range(repeats):
        painting.run_batch(repeat, 0)()
    assert (painting.first is not None) == (rank == 0)
    return found


def test_images_are_those_of_diffusers_own_pipeline(worker, base, stock) -> None:
    assert base.image is not None and difference(base.image, stock[0]) == 0.0
    ours = painted(worker, batch_size=2, repeats=2)
    assert [difference(one, other) for one, other in zip(ours, stock, strict=True)] == [0.0] * 4
    assert difference(stock[0], stock[1]) > 5  # or the above would prove little


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_batch_of_four_is_four_batches_of_one(worker, batch_size, stock) -> None:
    """Products of other shapes may round a level up or down."""
    ours = painted(worker, batch_size=batch_size, repeats=4 // batch_size)
    for one, other in zip(ours, stock, strict=True):
        assert numpy.abs(pixels(one) - pixels(other)).max() <= 1


def test_two_cards_paint_what_one_does(worker: Worker, stock: list[Any]) -> None:
    first, second = (painted(worker, 2, 1, rank=rank, cards=2) for rank in (0, 1))
    for place, one in ((0, first[0]), (2, first[1]), (1, second[0]), (3, second[1])):
        assert difference(one, stock[place]) < 0.1


def test_the_parts_of_a_batch_add_up_and_figures_are_of_the_timed_ones(base: Result) -> None:
    for sample in base.samples:
        names = ("text_encoding_s", "denoising_s", "decoding_s", "conversion_s")
        parts = [getattr(sample, name) for name in names]
        assert all(part > 0 for part in parts)
        assert 0.95 * sample.wall_s - 0.005 < sum(parts) <= sample.wall_s
        assert sample.denoising_s == max(parts)
    timed = [sample for sample in base.samples if not sample.warmup]
    assert [sample.warmup for sample in base.samples] == [True, False, False]
    figures = {
        name: metric.figure(Timed(samples=timed, items=()))
        for name, metric in metrics_of("text-to-image").items()
        if metric.figure
    }
    throughput = samples.metrics_of([(0, sample) for sample in base.samples]).throughput
    assert figures["seconds_per_image"] * throughput == pytest.approx(1)
    assert throughput == pytest.approx(sum(2 / s.wall_s for s in timed) / 2)
    gang = [(rank, replace(s, wall_s=s.wall_s + rank)) for rank in range(3) for s in timed]
    rate = samples.metrics_of(gang).throughput
    derived = samples.derived_figures(metrics_of("text-to-image"), gang)
    assert rate and derived["seconds_per_image"] * rate == pytest.approx(3), "of three cards"
    shares = [value for name, value in figures.items() if name.endswith("_share")]
    assert len(shares) == 4 and 0.9 < sum(shares) <= 1.0001


@pytest.mark.parametrize(
    ("images", "left_out", "expected"),
    [(6, 2, [True, True, False]), (7, 2, [True, True, False, False]), (2, 0, [False])],
)
def test_a_number_of_images_is_made_in_whole_batches(worker, images, left_out, expected) -> None:
    measure = replace(SHORT, warmup=min(left_out, 1), max_repeats=50)
    result = run(worker, images=images, warmup_batches=left_out, steps=1, measure=measure)
    assert [(s.warmup, s.items) for s in result.samples] == [(warmup, 2) for warmup in expected]


def test_a_job_without_a_batch_to_time_is_refused(worker: Worker) -> None:
    """measure.warmup may ask for more untimed batches than the plan knew of."""
    with pytest.raises(BadConfiguration, match="nothing would be timed"):
        run(worker, images=4, warmup_batches=0, measure=replace(SHORT, warmup=2))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8", "fp8"])
def test_other_precisions_paint_nearly_the_same(worker, base, precision) -> None:
    result = run(worker, precision=precision)
    assert 0 < difference(result.image, base.image) < 3
    assert base.weight_bytes is not None and result.weight_bytes is not None
    assert result.weight_bytes < 0.55 * base.weight_bytes
    if precision in ("int8", "fp8"):
        assert "% of the parameters, the rest in bf16" in result.precision_detail


def test_ways_to_compute_change_no_image(worker: Worker, base: Result) -> None:
    result = run(worker, attention="eager", channels_last=True)
    details = {"attention": "eager", "memory_format": "channels last"}
    assert details.items() <= result.details.items()
    assert difference(result.image, base.image) < 0.1


def test_the_denoiser_is_compiled_before_the_clock_runs(worker, monkeypatch) -> None:
    compiled: list[tuple[str, object]] = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: compiled.append((type(self).__name__, how))
    )
    worker.phases.clear()
    result = run(worker, torch_compile=True)
    assert compiled == [("UNet2DConditionModel", {"backend": "inductor"})]
    assert result.details["compiled"] == "unet" and result.compile_s > 0
    assert worker.phases.index("compile") < worker.phases.index("warmup")


@pytest.mark.parametrize(
    "changes",
    [{"scheduler": "pndm"}, {"guidance": 1.0}, {"seed": 43}, {"steps": 2}, {"height": 128}],
)
def test_what_is_work_changes_the_image(worker, base, changes) -> None:
    result = run(worker, **changes)
    if "height" in changes:
        assert result.details["size"] == "64x128"
        return
    assert difference(result.image, base.image) > 0.5
    named = "PNDMScheduler" if "scheduler" in changes else "DDIMScheduler"
    assert result.details["scheduler"] == named
    assert result.details["guidance"] == ("1" if "guidance" in changes else "7.5")


def test_products_of_fp32_are_exact_unless_told(worker: Worker) -> None:
    """torch lets convolutions run in TF32 unless it is told otherwise."""
    torch.backends.cudnn.allow_tf32 = True
    run(worker, steps=1)
    assert torch.backends.cudnn.allow_tf32 is False


def test_a_probe_paints_one_short_batch(worker: Worker) -> None:
    probe = replace(job(images=40), probe=True)
    result = text_to_image.run(probe, worker.context())
    assert [sample.warmup for sample in result.samples] == [False]


def test_an_image_of_one_colour_is_told() -> None:
    """Numbers that overflowed come out black."""
    black, other = Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8))
    other.putpixel((3, 3), (1, 0, 0))
    assert one_colour(black) and not one_colour(other)


def test_a_row_keeps_images_of_a_bounded_size() -> None:
    noise = numpy.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=numpy.uint8)
    assert difference(png_of(Image.fromarray(noise)), Image.fromarray(noise)) == 0.0
    kept = Image.open(io.BytesIO(png_of(Image.new("RGB", (2 * MOST_SIDE, MOST_SIDE)))))
    assert kept.size == (MOST_SIDE, MOST_SIDE // 2)


@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
def test_a_tensor_that_a_pipeline_lacks_is_not_made_up(part: str, tmp_path: Path) -> None:
    source = open_model("tiny-stable-diffusion")
    path = shutil.copytree(source.path, tmp_path / "pipeline")
    (file,) = (path / part).glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[3]
    save_file({n: t for n, t in tensors.items() if n != name}, file, metadata={"format": "pt"})
    with pytest.raises(DataMissing, match=f"{part}: 1 tensors .* {name}"):
        load_pipeline(replace(source, path=str(path)))
