"""Helpers for the tests of text generation: a request, a context, and a memory of loaded models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workloads.base import JobContext, JobDescription, MeasureSettings, Request, Result
from workloads.bench.collective import OneCard
from workloads.devices import device_for
from workloads.registry import find_workload

MODEL = "tiny-chatglm3"
ONCE = MeasureSettings(warmup=0, min_repeats=1, max_repeats=1, time_limit_s=600)

#: Of mixed length, so that a batch needs padding.
PROMPTS = [
    "类型#裙*版型#显瘦*风格#文艺",
    "类型#上衣",
    "类型#裤*版型#宽松*风格#性感*图案#线条*裤型#阔腿裤",
    "你好",
    "类型#裙*材质#网纱*颜色#粉红色*图案#线条*图案#刺绣*裙腰型#高腰*裙长#连衣裙*裙袖长#短袖*裙领型#圆领",
    "类型#上衣*材质#牛仔布*颜色#白色*风格#简约*图案#刺绣*衣样式#外套*衣款式#破洞",
    "a short English prompt",
    "类型#裙*风格#简约*图案#条纹*图案#线条*图案#撞色*裙型#鱼尾裙*裙袖长#无袖",
]

#: Small sizes by the names that families have for them; no two shapes are equal by chance.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "pad_token_id": 0,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 24),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 40),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim"), 48),
    "decoder_ffn_dim": 56,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    "encoder_layers": 2,
    **dict.fromkeys(("num_decoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv"), 6),
}


def write_dataset(path: Path, prompts: list[str] = PROMPTS) -> str:
    """A JSON-lines dataset of these prompts; its path as a dataset's name."""
    lines = [json.dumps({"content": text, "summary": ""}, ensure_ascii=False) for text in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def request(dataset: str, **changes: Any) -> Request:
    """A small job; keywords of Request's go there, all others are workload parameters."""
    fields: dict[str, Any] = {
        "workload": "text-generation",
        "model": MODEL,
        "dataset": dataset,
        "precision": "fp32",
        "batch_size": 2,
        "engine": "transformers",
        "measure": ONCE,
    }
    parameters: dict[str, Any] = {"output_tokens": 24, "prompts": len(PROMPTS), "keep_texts": 99}
    for name, value in changes.items():
        (fields if name in fields else parameters)[name] = value
    key = f"{fields['model']}|{fields['precision']}|{fields['engine']}"
    own = find_workload(fields["workload"]).parameters.model_fields
    return Request(
        residency_key=key,
        parameters={name: value for name, value in parameters.items() if name in own},
        settings={name: value for name, value in parameters.items() if name not in own},
        **fields,
    )


def described(**changes: Any) -> JobDescription:
    """The same as rules see it; keywords of JobDescription's go there, all others are settings."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "dataset": "advertisegen-synthetic",
        "precision": "fp32",
        "device": "cpu",
        "batch_size": 1,
        "cards": 1,
        "engine": "transformers",
    }
    parameters = {name: value for name, value in changes.items() if name not in fields}
    fields |= {name: value for name, value in changes.items() if name in fields}
    return JobDescription(parameters=parameters, **fields)


def one_layer(name: str, to: Path, *numbers: str) -> str:
    """The first layer of an embedded model as a checkpoint of its own; ``numbers`` are the fields
    of its config that count layers."""
    import torch
    from transformers import AutoConfig

    from workloads.models.catalog import EMBEDDED
    from workloads.models.loading import load_tokenizer, open_model
    from workloads.registry import task_of

    source, task = open_model(name), task_of(EMBEDDED[name])
    assert task is not None
    config = AutoConfig.from_pretrained(source.path)
    for number in numbers or ("num_hidden_layers",):
        setattr(config, number, 1)
    load = task.function("load")
    load(source, config=config, dtype=torch.float32).save_pretrained(to)
    load_tokenizer(source).save_pretrained(to)
    return str(to)


class Worker:
    """Stands in for a warm worker: keeps every model it loaded."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.phases: list[str] = []

    def resident(self, key: str, loader: Callable[[], Any]) -> Any:
        if key not in self.loaded:
            self.loaded[key] = loader()
        return self.loaded[key]

    def context(self, rank: int = 0, world_size: int = 1, collective: Any = None) -> JobContext:
        return JobContext(
            device=device_for("cpu"),
            rank=rank,
            world_size=world_size,
            collective=collective or OneCard(),
            enter_phase=self.phases.append,
            resident=self.resident,
            clock=time.perf_counter,
            cpu_clock=time.process_time,
        )

    def run(self, dataset: str, **changes: Any) -> Result:
        from workloads import text_generation

        return text_generation.run(request(dataset, **changes), self.context())
