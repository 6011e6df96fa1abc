"""The embedded text-to-image pipeline: Stable Diffusion's parts at 1/1000 of their size.

A CLIP text encoder of two layers, a U-Net of two levels with cross attention, an autoencoder of
four, so that an image's side is eight times a latent's. **Its weights are random**: realistic cost,
images of noise. Tokens are single bytes. Built per pair of diffusers and transformers versions,
since one pair may not read another's files.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from workloads.devices.base import installed_version
from workloads.inspection.checkpoints import PIPELINE_INDEX

NAME = "tiny-stable-diffusion"
#: Increment when the pipeline changes: part of the cache's key.
RECIPE = 1
SEED = 0
#: Default side of its images in pixels.
SIDE = 64
_BEGIN, _END = "<|startoftext|>", "<|endoftext|>"


def cache_key() -> str:
    """Return the built pipeline's cache key."""
    names = ("diffusers", "transformers")
    libraries = (f"{name}-{installed_version(name) or 'none'}" for name in names)
    return f"{NAME}-v{RECIPE}-{'-'.join(libraries)}"


def config() -> dict[str, Any]:
    """Return the parts in its model_index.json."""
    return {
        "_class_name": "StableDiffusionPipeline",
        "random_weights": True,
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def build(directory: Path) -> None:
    """Write all parts into an empty directory, in diffusers' layout."""
    import torch
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        unet = UNet2DConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            sample_size=SIDE // 8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=4,
            norm_num_groups=8,
        )
        vae = AutoencoderKL(
            block_out_channels=(16, 16, 32, 32),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=8,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            sample_size=SIDE,
        )
        vocabulary = _vocabulary()
        text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(vocabulary),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                projection_dim=32,
                bos_token_id=vocabulary[_BEGIN],
                eos_token_id=vocabulary[_END],
                pad_token_id=vocabulary[_END],
            )
        )
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    pipeline: Any = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=_tokenizer(directory / "tokenizer", vocabulary),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(directory)
    file = directory / PIPELINE_INDEX
    said = json.loads(file.read_text(encoding="utf-8")) | {"random_weights": True}
    file.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


@cache
def _vocabulary() -> dict[str, int]:
    """Return CLIP's letters for bytes, within a word and at its end, and its special tokens."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = [*map(chr, shown), *(chr(256 + place) for place in range(len(hidden)))]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), _BEGIN, _END]
    return {token: number for number, token in enumerate(tokens)}


def _tokenizer(directory: Path, vocabulary: dict[str, int]) -> Any:
    """Return CLIP's tokenizer without merges, from handwritten files: versions' own differ."""
    from transformers import CLIPTokenizer

    said = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True}
    directory.mkdir()
    for name, content in (("vocab.json", vocabulary), ("tokenizer_config.json", said)):
        text = json.dumps(content, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return CLIPTokenizer.from_pretrained(directory, trust_remote_code=False)
