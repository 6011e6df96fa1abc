"""Graphs of encoders, encoder-decoders and U-Nets, each beside torch on the same work."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers.exporters.exporter_onnx")

from diffusers import UNet2DConditionModel
from generation_cases import PROMPTS, Worker, one_layer, request
from PIL import Image

from workloads import text_encoding as encoding
from workloads import text_generation, text_to_image
from workloads.base import Unsupported
from workloads.engines.loaded import Answered
from workloads.engines.onnxruntime import calibration
from workloads.engines.onnxruntime.generation import OnnxSeq2Seq
from workloads.models.loading import open_model

pytestmark = pytest.mark.slow  # exports graphs

#: Exports of a dozen CPU seconds, which `make rehearsal` takes and `make test` does not.
ON_REQUEST = pytest.mark.skipif(
    "NIGHTGRID_REHEARSAL" not in os.environ, reason="dear: set NIGHTGRID_REHEARSAL to export them"
)
#: What is not folded at export is exported sooner; ONNX Runtime folds it when it opens the graph.
FAST = {"constant_folding": False}


def test_an_encoder_reads_what_torch_reads(dataset: str, tmp_path: Path) -> None:
    """Padded batches of texts: equal logits of real tokens, and the same work in the row. In static
    int8 the ranges come from a calibration on texts, and products of weights are integer ones."""
    model, data = one_layer("tiny-bert", tmp_path / "bert"), dataset
    found = {}
    for engine in ("transformers", "onnxruntime"):
        worker = Worker()
        job = request(data, workload="text-encoding", model=model, engine=engine, texts=8)
        result = encoding.run(job, worker.context())
        (encoder,) = (resident.engine for resident in worker.loaded.values())
        batch = encoder.prepare([encoder.ids(text, 128) for text in PROMPTS])
        real = batch.attention_mask.bool()
        found[engine] = (result, encoder.logits(batch)[real])
    (plain, logits), (graph, drawn) = found["transformers"], found["onnxruntime"]
    torch.testing.assert_close(drawn, logits, rtol=1e-4, atol=1e-4)
    timed = [(each.items, each.input_tokens, each.computed_tokens) for each in plain.samples]
    assert timed == [(e.items, e.input_tokens, e.computed_tokens) for e in graph.samples]
    assert sum(each.items for each in graph.samples) == 8
    assert graph.metrics["largest_output_difference"] < 1e-4 * graph.metrics["output_spread"]
    asked = {"model": model, "engine": "onnxruntime"}
    measuring = request(
        data, workload="onnx-calibration", prompts=8, save_calibration="read", **asked
    )
    measured = calibration.run(measuring, Worker().context())
    assert (measured.details["passes"], measured.samples[0].output_tokens) == ("8", 0)
    assert measured.samples[0].computed_tokens == measured.samples[0].input_tokens
    job = request(
        data, workload="text-encoding", precision="int8", calibration="read", texts=8, **asked
    )
    worker = Worker()
    static = encoding.run(job, worker.context())
    (encoder,) = (resident.engine for resident in worker.loaded.values())
    assert "QLinearMatMul 0 → " in static.details["operators_changed_by_optimization"]
    assert "DynamicQuantizeLinear" not in static.details["operators_run"]
    assert static.weight_bytes < 0.9 * graph.weight_bytes
    apart = (encoder.logits(batch)[real] - logits).abs()
    assert apart.max() > 0 and apart.mean() < 0.1 * logits.std()


@ON_REQUEST
def test_an_encoder_decoder_writes_what_generate_writes(dataset: str, tmp_path: Path) -> None:
    model = one_layer("tiny-t5", tmp_path / "t5", "num_layers", "num_decoder_layers")
    plain, graph = (
        text_generation.run(
            request(dataset, model=model, engine=engine, output_tokens=8, **more),
            Worker().context(),
        )
        for engine, more in (("transformers", {}), ("onnxruntime", FAST))
    )
    assert [each.output_ids for each in graph.items] == [each.output_ids for each in plain.items]
    computed = [each.computed_tokens for each in plain.samples]
    assert [each.computed_tokens for each in graph.samples] == computed
    assert all(0 < each.encoder_s < each.wall_s for each in graph.samples)
    assert graph.metrics["largest_output_difference"] < 1e-4 * graph.metrics["output_spread"]


def test_graphs_tell_no_loss_of_an_answer() -> None:
    """Reading sources by a graph, there is no model of torch to ask: the row says so, as it does of
    other engines without logits, and keeps what was timed."""
    nothing = {each.name: None for each in fields(OnnxSeq2Seq) if each.name != "figures"}
    with pytest.raises(Unsupported, match="cannot return logits"):
        list(OnnxSeq2Seq(**nothing).answer_logits([Answered(prompt=(1,), answer=(2,))]))


def with_small_unet(to: Path, **more: int) -> str:
    """A copy of the embedded pipeline with a U-Net of one level, which is exported sooner."""
    shutil.copytree(open_model("tiny-stable-diffusion").path, to)
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(16,),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        mid_block_type=None,
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
        **more,
    )
    unet.save_pretrained(to / "unet")
    return str(to)


def test_a_denoiser_that_takes_guidance_is_refused(tmp_path: Path) -> None:
    """A distilled U-Net reads the strength of guidance, which the graph would not be given."""
    model = with_small_unet(tmp_path / "distilled", time_cond_proj_dim=8)
    asked = {"model": model, "engine": "onnxruntime", "steps": 1, "images": 2}
    job = request("image-prompts", workload="text-to-image", **asked)
    with pytest.raises(Unsupported, match="takes something else"):
        text_to_image.run(job, Worker().context())


@ON_REQUEST
def test_a_pipeline_paints_what_diffusers_paints(tmp_path: Path) -> None:
    pipeline = with_small_unet(tmp_path / "pipeline")
    painted = {}
    for engine in ("diffusers", "onnxruntime"):
        job = request(
            "image-prompts",
            workload="text-to-image",
            model=pipeline,
            engine=engine,
            steps=2,
            images=2,
            warmup_batches=0,
            **({} if engine == "diffusers" else FAST),
        )
        result = text_to_image.run(replace(job, residency_key=engine), Worker().context())
        painted[engine] = numpy.asarray(Image.open(io.BytesIO(result.image)), dtype=float)
    assert numpy.abs(painted["diffusers"] - painted["onnxruntime"]).max() <= 1
    assert "nchwc.Conv 0 → " in result.details["operators_changed_by_optimization"]
    assert result.metrics["largest_output_difference"] < 1e-3 * result.metrics["output_spread"]
