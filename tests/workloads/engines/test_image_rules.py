"""Rules of text to image: what a plan refuses, and what becomes a row that says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generation_cases import described
from safetensors.torch import save_file

from workloads.base import Refusal
from workloads.engines.images import facts_of
from workloads.registry import WORKLOADS
from workloads.rules import refusals

SPEC = WORKLOADS["text-to-image"]
USUAL = {
    "model": "tiny-stable-diffusion",
    "dataset": "image-prompts",
    "precision": "bf16",
    "batch_size": 4,
    "engine": SPEC.default_engine,
}
HABANA = {"device": "hpu", "engine": "optimum-habana"}
FLUX = {
    "_class_name": "FluxPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
}


def pipeline(directory: Path, index: dict[str, Any], **denoiser: Any) -> str:
    directory.mkdir()
    (directory / "model_index.json").write_text(json.dumps(index))
    for part in index:
        (directory / part).mkdir()
        (directory / part / "config.json").write_text(json.dumps(denoiser))
        save_file({}, directory / part / "model.safetensors")
    return str(directory)


def refused(**changes: Any) -> list[Refusal]:
    job = described(**(USUAL | changes))
    parameters = SPEC.validate(job.parameters, job.engine)
    return list(refusals(SPEC, replace(job, parameters=parameters)))


def test_a_usual_job_runs_everywhere() -> None:
    assert SPEC.default_engine == "diffusers"
    for device in ("cpu", "cuda", "hpu"):
        assert refused(device=device, cards=8) == []
    assert refused(**HABANA, hpu_mode="eager") == []


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
        # What a device or an engine lacks becomes a row.
        ({"attention": "xformers"}, "attention", None),
        (
            {"device": "hpu", "precision": "fp32", "matmul_precision": "high"},
            "matmul_precision",
            None,
        ),
        (HABANA | {"scheduler": "pndm"}, "scheduler", None),
        (HABANA | {"hpu_mode": "compile"}, "hpu_mode", None),
        (HABANA | {"channels_last": True}, "channels_last", None),
        (HABANA | {"torch_compile": True}, "torch_compile", None),
        (HABANA | {"precision": "fp8"}, "precision", None),
        (HABANA | {"device": "cpu"}, "engine", None),
    ],
)
def test_what_contradicts_itself_is_refused_and_what_is_lacking_unsupported(
    changes, setting, words
) -> None:
    (refusal,) = refused(**changes)
    assert (refusal.setting, refusal.unsupported) == (setting, words is None)
    assert (words or "") in refusal.reason


def test_a_hint_of_images_is_no_new_mistake() -> None:
    for changes in ({"images": 3}, {"images": 8}):
        (refusal,) = refused(**changes)
        assert refused(images=int(refusal.hint.split("images: ")[1].split()[0])) == []
    (refusal,) = refused(height=500)
    assert refusal.hint == "write 496 or 504" and refused(height=496) == refused(height=504) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scheduler": "ddim"}, "flow matching"),
        ({"guidance": 3.5}, "has no guidance"),
        ({"channels_last": True}, "denoises by a transformer"),
        ({"attention": "eager"}, "denoises by a transformer"),
    ],
)
def test_settings_that_a_pipeline_lacks_are_refused(tmp_path, changes, words) -> None:
    """FLUX was trained for flow matching, and its fast form was distilled without guidance."""
    fast = pipeline(tmp_path / "fast", FLUX, guidance_embeds=False)
    assert refused(model=fast, scheduler="own") == refused(model=fast) == []
    (refusal,) = refused(model=fast, **changes)
    assert refusal.setting in changes and words in refusal.reason and not refusal.unsupported
    guided = pipeline(tmp_path / "guided", FLUX, guidance_embeds=True)
    assert refused(model=guided, guidance=3.5) == []


def test_other_pipelines_are_refused(tmp_path) -> None:
    """DiT paints classes by their number; Gaudi's library has classes that nobody has run here; a
    directory without an index is no pipeline."""
    dit = pipeline(tmp_path / "dit", FLUX | {"text_encoder": [None, None]})
    (refusal,) = refused(model=dit)
    assert refusal.setting == "model" and "reads no text" in refusal.reason
    assert facts_of(str(tmp_path)) is None
    (refusal,) = refused(model=pipeline(tmp_path / "flux", FLUX), **HABANA)
    assert refusal.setting == "model" and refusal.unsupported and "FluxPipeline" in refusal.reason
