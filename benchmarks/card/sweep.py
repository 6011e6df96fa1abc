"""Every way of the product that one card can run, with tiny models and without Ray.

    python -m benchmarks.card.sweep OUT [SECONDS] [DEVICE] [NAMES]

OUT is a folder for ``sweep.jsonl``. A cell has its state, seconds, losses or tokens, and the first
reason of a failure; the same command with DEVICE ``cpu`` gives the host's losses beside them.
NAMES, separated by semicolons, picks cells; a cell that would begin after SECONDS (default 200) is
left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.card.rows import Rows
from benchmarks.contenders.alone import Alone, request
from workloads.base import MeasureSettings
from workloads.devices import device_for

_MEASURE = MeasureSettings(warmup=1, min_repeats=1, max_repeats=2, time_limit_s=5.0)


def _generation(
    precision: str = "bf16", engine: str = "transformers", **own: Any
) -> dict[str, Any]:
    return {
        "workload": "text-generation",
        "model": "tiny-chatglm3",
        "dataset": "advertisegen-synthetic",
        "precision": precision,
        "engine": engine,
        "parameters": {"prompts": 4, "output_tokens": 8, "ignore_eos": True} | own,
    }


def _finetuning(precision: str = "bf16", method: str = "lora", **own: Any) -> dict[str, Any]:
    parameters = {"steps": 3, "samples": 16, "max_length": 64, "method": method} | own
    return {
        "workload": "finetuning",
        "model": "tiny-chatglm3",
        "dataset": "advertisegen-synthetic",
        "precision": precision,
        "parameters": parameters,
    }


def _verification(precision: str, engine: str = "transformers") -> dict[str, Any]:
    cell = _generation(precision, engine) | {"workload": "verification"}
    return cell | {"parameters": {"prompts": 4, "output_tokens": 16}}


def _images(precision: str, **own: Any) -> dict[str, Any]:
    return {
        "workload": "text-to-image",
        "model": "tiny-stable-diffusion",
        "dataset": "image-prompts",
        "precision": precision,
        "engine": "diffusers",
        "parameters": {"steps": 3} | own,
    }


_T5 = {
    "workload": "finetuning",
    "model": "tiny-t5",
    "dataset": "cnn-dailymail-synthetic",
    "precision": "bf16",
    "parameters": {
        "steps": 3,
        "samples": 16,
        "method": "full",
        "max_source_length": 48,
        "max_target_length": 24,
    },
}
_BERT = {
    "workload": "pretraining",
    "model": "tiny-bert",
    "dataset": "english-corpus-synthetic",
    "precision": "fp32",
    "parameters": {"steps": 3, "samples": 16, "max_length": 64, "autocast": "bf16"},
}
_ENCODING = {
    "workload": "text-encoding",
    "model": "tiny-bert",
    "dataset": "english-corpus-synthetic",
    "precision": "bf16",
    "parameters": {"texts": 8},
}
_APART = {"padding": "packing", "packed_attention": "apart"}

#: What no card has run comes first; what compiles, and so is slow, last.
CELLS: dict[str, dict[str, Any]] = {
    "graph bf16": _generation(engine="graph"),
    "graph fp32": _generation("fp32", "graph"),
    "graph int8": _generation("int8", "graph"),
    "graph int4": _generation("int4", "graph"),
    "graph fp8": _generation("fp8", "graph"),
    "graph continuous": _generation(engine="graph", batching="continuous"),
    "sorted": _generation(batching="sorted"),
    "profile": _generation(profile=True),
    "fp8 torchao": _generation("fp8"),
    "int8": _generation("int8"),
    "int4": _generation("int4"),
    "t5 writes": _generation() | {"model": "tiny-t5"},
    "liger": _finetuning(fused_kernels="liger"),
    "packed apart": _finetuning(**_APART),
    "packed to the longest": _finetuning(**_APART, packed_length="longest"),
    "chunked": _finetuning(logits="chunked"),
    "adamw fused": _finetuning(optimizer="adamw-fused"),
    "adamw 8bit": _finetuning(optimizer="adamw-8bit"),
    "adamw paged": _finetuning(optimizer="adamw-8bit-paged"),
    "vera": _finetuning(method="vera"),
    "qlora": _finetuning(method="qlora"),
    "fp32 autocast fp16": _finetuning("fp32", autocast="fp16"),
    "full": _finetuning("fp32", "full"),
    "full bf16, checkpointed": _finetuning("bf16", "full", gradient_checkpointing=True),
    "2:4 sparse": _finetuning("fp32", "full", sparsity="2:4"),
    "xformers": _finetuning(attention="xformers"),
    "flash attention 2": _finetuning(attention="flash_attention_2"),
    "t5 full": _T5,
    "bert": _BERT,
    "encoding": _ENCODING,
    "images fp32": _images("fp32"),
    "images fp16": _images("fp16", channels_last=True),
    "verify bf16": _verification("bf16"),
    "verify fp32": _verification("fp32"),
    "verify graph fp32": _verification("fp32", "graph"),
    "packed apart, compiled": _finetuning(**_APART, torch_compile=True, packed_length="longest"),
    "compiled static cache": _generation(torch_compile=True),
    "images compiled": _images("bf16", torch_compile=True),
}
_SHOWN = ("agrees", "attention", "fused_kernels", "first_parting", "pipeline", "packed_attention")


def main(out: str, seconds: str = "200", device: str = "cuda", names: str = "") -> None:
    """Run the cells one after the other and print a line for each."""
    card = device_for(device)
    with Rows(card, Path(out) / "sweep.jsonl") as rows:
        for name, cell in CELLS.items():
            if names and name not in names.split(";"):
                continue
            started_s = rows.elapsed_s
            if started_s > float(seconds):
                return
            figures = _figures(card, name, cell)
            rows.write(cell=name, **figures, seconds=round(rows.elapsed_s - started_s, 1))
            card.release_memory()


def _figures(card: Any, name: str, cell: dict[str, Any]) -> dict[str, Any]:
    """State and numbers of one cell; a failure of any kind is an answer here."""
    try:
        job = request(**cell, batch_size=2, measure=_MEASURE, residency_key=name)
        result = Alone(card).run(job)
    except Exception as error:
        reason = " ".join(str(error).split())[:600]
        return {"state": type(error).__name__, "reason": reason}
    return {
        "state": "ok",
        "losses": [sample.loss for sample in result.samples if sample.loss is not None],
        "output_tokens": sum(sample.output_tokens for sample in result.samples),
        "wall_s": [round(sample.wall_s, 4) for sample in result.samples],
        "metrics": dict(result.metrics),
        "details": {key: value for key, value in dict(result.details).items() if key in _SHOWN},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
