"""Jobs of the real optimum-habana in one process under the stand-in; prints their rows as JSON.

With DATASET and MODEL it runs all of them in lazy mode: text generation and training beside the
bridge's counters, Stable Diffusion, T5 and BERT. What stock libraries compute comes first, in
forks, since the library changes transformers for the whole process; gangs are forked before it has
threads. Without arguments it trains BERT alone, compiled.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gang_rank
import numpy
import torch
from finetuning_cases import PRETRAINING, SUMMARIES, parameters
from finetuning_cases import request as training_request
from generation_cases import Worker, request
from habana_frameworks.torch.hpex import kernels
from habana_frameworks.torch.hpu import graphs, metrics
from PIL import Image

from workloads import finetuning, text_generation, text_to_image
from workloads.base import MeasureSettings, Request, Result
from workloads.devices import device_for
from workloads.devices.base import torch_compilations
from workloads.engines.optimum_habana import prepare
from workloads.models.loading import open_model

TWICE = MeasureSettings(warmup=1, min_repeats=2, max_repeats=2, time_limit_s=600)
SAMPLES = ("loss", "items", "input_tokens", "computed_tokens", "warmup", "encoder_s", "wall_s")


def values_of(result: Result) -> dict[str, Any]:
    return {
        **{name: [getattr(sample, name) for sample in result.samples] for name in SAMPLES},
        "texts": [[item.index, item.output_tokens, item.output_text] for item in result.items],
        "metrics": dict(result.metrics),
        "details": dict(result.details),
        "trainable": result.trainable_parameter_count,
    }


def run(workload: Callable[..., Result], job: Request) -> dict[str, Any]:
    before = torch_compilations().graphs or 0
    result = workload(job, replace(Worker().context(), device=device_for("hpu")))
    return values_of(result) | {"graphs": (torch_compilations().graphs or 0) - before}


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """A channel on which a process forked from this one sends what a function returns."""
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()

    def send() -> None:
        theirs.send(function(*arguments))

    fork.Process(target=send, daemon=True).start()
    theirs.close()
    return mine


def gang(job: Request) -> list[dict[str, Any]]:
    """Results of two ranks, in processes forked from this one before it has threads."""
    _, channels = gang_rank.start(_rank, 2, job)
    return [channel.recv() for channel in channels]


def _rank(rank: int, world_size: int, port: int, job: Request, channel: Any) -> None:
    os.environ |= {"HABANA_VISIBLE_MODULES": "0,1", "HLS_MODULE_ID": str(rank)}
    with gang_rank.member(rank, world_size, port, "hpu") as together:
        context = Worker().context(rank=rank, world_size=world_size, collective=together)
        result = finetuning.run(job, replace(context, device=device_for("hpu")))
    channel.send(values_of(result))


# ---------------------------------------------------------------- the bridge's counters


_CONFIG = (
    *("static_shapes", "trim_logits", "reuse_cache", "bucket_internal", "bucket_size"),
    *("limit_hpu_graphs", "attn_softmax_bf16", "use_flash_attention", "use_cache"),
    *("flash_attention_recompute", "flash_attention_fast_softmax"),
)


_FACTS = (
    *("timed_parts", "timed_compilations", "timed_cpu_fallbacks", "warmup_steps", "warmup_end"),
    *("shapes", "shapes_unmet"),
)


def counted(dataset: str, model: str) -> dict[str, Any]:
    """Generate with two shapes (a batch of two, a partial one), and train."""
    from workloads.engines.optimum_habana.generation import OptimumHabanaEngine

    configs: list[dict[str, Any]] = []
    config_of = OptimumHabanaEngine.config

    def noting(*given: Any) -> Any:
        config = config_of(*given)
        configs.append({name: value for name, value in vars(config).items() if name in _CONFIG})
        return config

    OptimumHabanaEngine.config = noting  # type: ignore[method-assign]
    small = {"prompts": 3, "output_tokens": 4, "measure": TWICE, "hpu_mode": "lazy"}
    job = request(dataset, model=model, engine="optimum-habana", precision="bf16", **small)
    train = replace(
        job,
        workload="finetuning",
        parameters=parameters(steps=3, samples=8, max_length=64),
        settings={},  # of engines' own settings the trainer takes none
        dataset="advertisegen-synthetic",
    )
    numbers = metrics.metric_global("graph_compilation").numbers
    rows: dict[str, Any] = {}
    for workload, one in ((text_generation.run, job), (finetuning.run, train)):
        before = numbers["TotalNumber"]
        kernels.softmax_modes.clear()
        result = workload(one, replace(Worker().context(), device=device_for("hpu")))
        rows[one.workload] = {
            **{name: getattr(result, name) for name in _FACTS},
            "compiled_in_all": numbers["TotalNumber"] - before,
            "details": dict(result.details),
            "softmax": sorted(kernels.softmax_modes),
        }
    OptimumHabanaEngine.config = config_of  # type: ignore[method-assign]
    return rows | {"config": configs[-1]}


# ---------------------------------------------------------------- Stable Diffusion


def make_xl(directory: str) -> None:
    """Stable Diffusion XL's parts at the embedded pipeline's size: two text encoders, and a U-Net
    that is told the size of the image."""
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


def paint(engine: str, device: str, **changes: Any) -> Result:
    usual = {"workload": "text-to-image", "model": "tiny-stable-diffusion", "steps": 4}
    job = request("image-prompts", **{**usual, "engine": engine, "measure": TWICE, **changes})
    return text_to_image.run(job, replace(Worker().context(), device=device_for(device)))


def pixels(result: Result) -> Any:
    assert result.image is not None
    return numpy.asarray(Image.open(io.BytesIO(result.image)), dtype=float)


def painted_by_diffusers(xl: str) -> dict[str, Any]:
    jobs = {"usual": {}, "unguided": {"guidance": 1.0}, "euler": {"scheduler": "euler"}}
    jobs["xl"] = {"model": xl}
    return {name: pixels(paint("diffusers", "cpu", **changes)) for name, changes in jobs.items()}


def painted(xl: str, stock: dict[str, Any]) -> dict[str, Any]:
    jobs: dict[str, dict[str, Any]] = {
        "usual": {},
        "collected": {"hpu_graphs": False},
        "unguided": {"guidance": 1.0},
        "euler": {"scheduler": "euler"},
        "bf16": {"precision": "bf16"},
        "xl": {"model": xl},
    }
    rows = {}
    for name, changes in jobs.items():
        before = graphs.captured, graphs.replayed
        result = paint("optimum-habana", "hpu", **changes)
        parts = ("text_encoding_s", "denoising_s", "decoding_s", "conversion_s")
        samples = result.samples
        rows[name] = {
            "difference": float(numpy.abs(pixels(result) - stock.get(name, stock["usual"])).mean()),
            "captured": graphs.captured - before[0],
            "replayed": graphs.replayed - before[1],
            "timed_compilations": result.timed_compilations,
            "details": dict(result.details),
            "precision": result.precision_detail,
            "batches": [sample.warmup for sample in samples],
            "parts": [sum(getattr(sample, part) or 0.0 for part in parts) for sample in samples],
            "walls": [sample.wall_s for sample in samples],
        }
    return rows


# ---------------------------------------------------------------- T5


def t5_training(batch_size: int, **changes: Any) -> Request:
    fields = SUMMARIES | {"samples": 16, "learning_rate": 1e-3} | changes
    measure = MeasureSettings(warmup=1, time_limit_s=600)
    job = training_request(**fields, batch_size=batch_size, measure=measure)
    return replace(job, engine="optimum-habana")


def summing_up(**changes: Any) -> Request:
    sizes = {"source_prefix": "summarize: ", "max_source_length": 48, "ignore_eos": True}
    usual = {"model": "tiny-t5", "prompts": 3, "output_tokens": 12, **sizes}
    return request("cnn-dailymail-synthetic", **usual | changes)


def summed_up_by_transformers() -> dict[str, Any]:
    return values_of(text_generation.run(summing_up(attention="eager"), Worker().context()))


def t5(stock: dict[str, Any], both: list[dict[str, Any]]) -> dict[str, Any]:
    habana = {"engine": "optimum-habana"}
    return {
        "stock": stock,
        "gang": both,
        "full": run(finetuning.run, t5_training(4)),
        "written": run(text_generation.run, summing_up(**habana)),
        "written in bf16": run(text_generation.run, summing_up(**habana, precision="bf16")),
    }


# ---------------------------------------------------------------- BERT


def bert_training(mode: str, *, batch_size: int = 4, **changes: Any) -> Request:
    """Three steps after three of warm-up; the schedule is that of ten."""
    engine = changes.pop("engine", "optimum-habana")
    fields = PRETRAINING | {"learning_rate": 2e-3, "schedule_steps": 10} | changes
    return replace(
        training_request(**fields, batch_size=batch_size),
        engine=engine,
        measure=MeasureSettings(warmup=3, time_limit_s=600),
        settings={"hpu_mode": mode} if engine != "transformers" else {},
    )


def bert(both: list[dict[str, Any]]) -> dict[str, Any]:
    """Fresh weights and a checkpoint's, in fp32 and under bf16 autocast; and the same job by
    Nightgrid's own loop on the same card."""
    return {
        "gang": both,
        "fresh": run(finetuning.run, bert_training("lazy")),
        "mixed": run(finetuning.run, bert_training("lazy", autocast="bf16")),
        "own loop": run(finetuning.run, bert_training("lazy", engine="transformers")),
        "checkpoint": run(finetuning.run, bert_training("lazy", initial_weights="checkpoint")),
    }


def adapted() -> dict[str, Any]:
    """The same LoRA of ChatGLM3 by the library's trainer and by Nightgrid's own loop."""
    fields = {"method": "lora", "samples": 16, "max_length": 64, "learning_rate": 2e-3, "steps": 4}
    rows = {}
    for engine in ("optimum-habana", "transformers"):
        measure = MeasureSettings(warmup=3, time_limit_s=600)
        job = training_request(**fields, padding="fixed", batch_size=2, measure=measure)
        rows[engine] = run(finetuning.run, replace(job, engine=engine))
    return rows


# ---------------------------------------------------------------- all of them


def lazy(dataset: str, model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as xl:
        make_xl(xl)
        images = forked(painted_by_diffusers, xl)
        texts = forked(summed_up_by_transformers)
        stock_images, stock_texts = images.recv(), texts.recv()
        prepare(device_for("hpu"))
        of_t5 = gang(t5_training(2, gradient_checkpointing=True))
        of_bert = gang(bert_training("lazy", batch_size=2))
        return {
            "t5": t5(stock_texts, of_t5),
            "bert": bert(of_bert),
            "adapted": adapted(),
            "counted": counted(dataset, model),
            "images": painted(xl, stock_images),
        }


def compiled() -> dict[str, Any]:
    prepare(device_for("hpu"))
    return {"fresh": run(finetuning.run, bert_training("compile"))}


torch.set_num_threads(1)
print("ROWS", json.dumps(lazy(*sys.argv[1:]) if sys.argv[1:] else compiled()), flush=True)
