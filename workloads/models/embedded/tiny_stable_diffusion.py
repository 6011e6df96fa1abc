"""The embedded text-to-image pipeline: Stable Diffusion's parts at 1/1000 of their size.

A CLIP text encoder of two layers, a U-Net of two levels with cross attention, an autoencoder of
four, so that an image's side is eight times a latent's. **Its weights are random**: realistic cost,
images of noise. Tokens are single bytes: CLIP's letters for them, within a word and at its end, and
no merges. Built per pair of diffusers and transformers versions, since one pair may not read
another's files.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from workloads.devices.base import installed_version
from workloads.inspection.checkpoints import PIPELINE_INDEX
from workloads.models.embedded import FILES, read_file

NAME = "tiny-stable-diffusion"
#: Increment when the pipeline changes: part of the cache's key.
RECIPE = 1
SEED = 0

#: Return the parts in its model_index.json.
config = partial(read_file, NAME, PIPELINE_INDEX)


def cache_key() -> str:
    """Return the built pipeline's cache key."""
    names = ("diffusers", "transformers")
    libraries = (f"{name}-{installed_version(name) or 'none'}" for name in names)
    return f"{NAME}-v{RECIPE}-{'-'.join(libraries)}"


def build(directory: Path) -> None:
    """Write all parts into an empty directory, in diffusers' layout."""
    import torch
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    parts = read_file(NAME, "parts.json")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        unet = UNet2DConditionModel(**parts["unet"])
        vae = AutoencoderKL(**parts["vae"])
        text_encoder = CLIPTextModel(CLIPTextConfig(**parts["text_encoder"]))
    pipeline: Any = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=CLIPTokenizer.from_pretrained(FILES / NAME, trust_remote_code=False),
        unet=unet,
        scheduler=DDIMScheduler(**parts["scheduler"]),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(directory)
    file = directory / PIPELINE_INDEX
    said = json.loads(file.read_text(encoding="utf-8")) | {"random_weights": True}
    file.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
