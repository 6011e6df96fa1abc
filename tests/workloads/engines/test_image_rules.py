"""Rules of text to image: what a plan refuses, and what becomes a row that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads.base import JobDescription, Refusal
from workloads.engines.images import facts_of
from workloads.registry import WORKLOADS
from workloads.rules import refusals

SPEC = WORKLOADS["text-to-image"]
FLUX = {
    "_class_name": "FluxPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
DIT = {
    "_class_name": "DiTPipeline",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "transformer": ["diffusers", "DiTTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def pipeline(directory: Path, index: dict[str, Any], **denoiser: Any) -> str:
    """A pipeline's directory as far as a plan reads it."""
    (directory / "transformer").mkdir(parents=True)
    (directory / "model_index.json").write_text(json.dumps(index))
    (directory / "transformer" / "config.json").write_text(json.dumps(denoiser))
    return str(directory)


def asked(**changes: Any) -> list[Refusal]:
    """All that speaks against a job of the embedded pipeline with these changes."""
    fields: dict[str, Any] = {
        "model": "tiny-stable-diffusion",
        "dataset": "image-prompts",
        "precision": "bf16",
        "device": "cpu",
        "batch_size": 4,
        "cards": 1,
        "engine": SPEC.default_engine,
    }
    given = {name: value for name, value in changes.items() if name not in fields}
    fields |= {name: value for name, value in changes.items() if name in fields}
    parameters = SPEC.validate(given, fields["engine"])
    return list(refusals(SPEC, JobDescription(parameters=parameters, **fields)))


def test_a_usual_job_runs_everywhere() -> None:
    """With either engine, on one card and on several."""
    assert SPEC.default_engine == "diffusers"
    for device in ("cpu", "cuda", "hpu"):
        assert asked(device=device, cards=8) == []
    assert asked(device="hpu", engine="optimum-habana", hpu_mode="eager") == []


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({"height": 500}, "height", "not divisible by 8"),
        ({"width": 12}, "width", "not divisible by 8"),
        ({"images": 3}, "batch_size", "more than the 3 images"),
        ({"images": 4, "cards": 2}, "batch_size", "on 2 cards"),
        ({"images": 8}, "warmup_batches", "8 images are 2 batches of 4, and 2 of them"),
        ({"images": 4, "warmup_batches": 1}, "warmup_batches", "nothing would be timed"),
        ({"matmul_precision": "high"}, "matmul_precision", "about fp32 products"),
        ({"model": "tiny-chatglm3"}, "model", "a causal language model"),
    ],
)
def test_what_contradicts_itself_is_refused(
    changes: dict[str, Any], setting: str, words: str
) -> None:
    """The grid starts nothing, and points at the setting."""
    (found,) = asked(**changes)
    assert (found.setting, found.unsupported) == (setting, False)
    assert words in found.reason


def test_a_hint_of_images_is_no_new_mistake() -> None:
    """Whoever writes what the message says is not refused again."""
    for changes in ({"images": 3}, {"images": 8}):
        (found,) = asked(**changes)
        number = int(found.hint.split("images: ")[1].split()[0])
        assert asked(images=number) == []
    (found,) = asked(height=500)
    assert found.hint == "write 496 or 504" and asked(height=496) == asked(height=504) == []


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"attention": "xformers"}, "attention"),
        ({"device": "hpu", "precision": "fp32", "matmul_precision": "high"}, "matmul_precision"),
        ({"device": "hpu", "engine": "optimum-habana", "scheduler": "pndm"}, "scheduler"),
        ({"device": "hpu", "engine": "optimum-habana", "hpu_mode": "compile"}, "hpu_mode"),
        ({"device": "hpu", "engine": "optimum-habana", "channels_last": True}, "channels_last"),
        ({"device": "hpu", "engine": "optimum-habana", "torch_compile": True}, "torch_compile"),
        ({"device": "hpu", "engine": "optimum-habana", "precision": "fp8"}, "precision"),
        ({"device": "cpu", "engine": "optimum-habana"}, "engine"),
    ],
)
def test_what_a_device_lacks_becomes_a_row(changes: dict[str, Any], setting: str) -> None:
    """It makes sense elsewhere."""
    (found,) = asked(**changes)
    assert (found.setting, found.unsupported) == (setting, True)


@pytest.mark.parametrize(
    ("changes", "setting", "words"),
    [
        ({"scheduler": "ddim"}, "scheduler", "flow matching"),
        ({"guidance": 3.5}, "guidance", "has no guidance"),
        ({"channels_last": True}, "channels_last", "denoises by a transformer"),
        ({"attention": "eager"}, "attention", "denoises by a transformer"),
    ],
)
def test_settings_that_a_pipeline_lacks_are_refused(
    tmp_path: Path, changes: dict[str, Any], setting: str, words: str
) -> None:
    """FLUX was trained for flow matching, and its fast form was distilled without guidance."""
    fast = pipeline(tmp_path / "fast", FLUX, guidance_embeds=False)
    assert asked(model=fast, scheduler="own") == asked(model=fast) == []
    (found,) = asked(model=fast, **changes)
    assert found.setting == setting and words in found.reason and not found.unsupported
    guided = pipeline(tmp_path / "guided", FLUX, guidance_embeds=True)
    assert asked(model=guided, guidance=3.5) == []


def test_a_pipeline_without_texts_is_refused(tmp_path: Path) -> None:
    """DiT paints classes by their number."""
    (found,) = asked(model=pipeline(tmp_path / "dit", DIT))
    assert found.setting == "model" and "reads no text" in found.reason
    assert facts_of(str(tmp_path)) is None  # nor is a directory without an index a pipeline


def test_other_pipelines_than_those_tried_are_no_gaudi_rows(tmp_path: Path) -> None:
    """The library has further classes, which nobody has run here."""
    flux = pipeline(tmp_path / "flux", FLUX)
    (found,) = asked(model=flux, device="hpu", engine="optimum-habana")
    assert found.setting == "model" and found.unsupported and "FluxPipeline" in found.reason
