"""Jobs of text to image in one process under the stand-in; prints what came of each as JSON.

Stock diffusers come first, since the library changes transformers for the whole process.
"""

from __future__ import annotations

import io
import json
import tempfile
from dataclasses import replace
from typing import Any

import numpy
from generation_cases import Worker, request
from PIL import Image

from workloads import text_to_image
from workloads.base import MeasureSettings, Result
from workloads.devices import device_for
from workloads.models.loading import open_model

MEASURE = MeasureSettings(warmup=1, min_repeats=2, max_repeats=2, time_limit_s=600)
CHANGES: dict[str, dict[str, Any]] = {
    "usual": {},
    "collected": {"hpu_graphs": False},
    "unguided": {"guidance": 1.0},
    "euler": {"scheduler": "euler"},
    "four": {"batch_size": 4},
    "bf16": {"precision": "bf16"},
}


def make_xl(directory: str) -> None:
    """Stable Diffusion XL's parts at the embedded pipeline's size: two text encoders, and a U-Net
    that is told the size of the image."""
    import torch
    from diffusers import (
        DDIMScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextModelWithProjection

    small = StableDiffusionPipeline.from_pretrained(
        open_model("tiny-stable-diffusion").path, safety_checker=None
    )
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=32 + 6 * 8,
        norm_num_groups=8,
    )
    StableDiffusionXLPipeline(
        vae=small.vae,
        text_encoder=small.text_encoder,
        text_encoder_2=CLIPTextModelWithProjection(small.text_encoder.config),
        tokenizer=small.tokenizer,
        tokenizer_2=small.tokenizer,
        unet=unet,
        scheduler=DDIMScheduler.from_config(small.scheduler.config),
    ).save_pretrained(directory)


def run(engine: str, device: str, **changes: Any) -> Result:
    """Paint with an engine, the pipeline freshly loaded."""
    job = request(
        "image-prompts",
        **{
            "workload": "text-to-image",
            "model": "tiny-stable-diffusion",
            "engine": engine,
            "measure": MEASURE,
            "steps": 4,
            **changes,
        },
    )
    context = replace(Worker().context(), device=device_for(device))
    return text_to_image.run(job, context)


def pixels(result: Result) -> Any:
    assert result.image is not None
    return numpy.asarray(Image.open(io.BytesIO(result.image)), dtype=float)


def main() -> None:
    """Paint everything twice: as diffusers does it, and as the library does."""
    with tempfile.TemporaryDirectory() as directory:
        make_xl(directory)
        CHANGES["xl"] = {"model": directory}
        paint_all()


def paint_all() -> None:
    """The jobs themselves."""
    stock = {
        name: pixels(run("diffusers", "cpu", **changes))
        for name, changes in CHANGES.items()
        if name in ("usual", "unguided", "euler", "xl")
    }
    from habana_frameworks.torch.hpu import graphs

    done = {}
    for name, changes in CHANGES.items():
        before = graphs.captured, graphs.replayed
        result = run("optimum-habana", "hpu", **changes)
        reference = stock.get(name, stock["usual"])
        done[name] = {
            "difference": float(numpy.abs(pixels(result) - reference).mean()),
            "captured": graphs.captured - before[0],
            "replayed": graphs.replayed - before[1],
            "timed_compilations": result.timed_compilations,
            "details": dict(result.details),
            "precision": result.precision_detail,
            "batches": [sample.warmup for sample in result.samples],
            "parts": [
                (sample.text_encoding_s or 0.0)
                + (sample.denoising_s or 0.0)
                + (sample.decoding_s or 0.0)
                + (sample.conversion_s or 0.0)
                for sample in result.samples
            ],
            "walls": [sample.wall_s for sample in result.samples],
        }
    print("ROWS", json.dumps(done))


main()
