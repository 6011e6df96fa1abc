"""T5 by optimum-habana in one process under the stand-in, and as a gang of two forked from it.

Prints what each job measured as JSON: T5 trained whole, with and without gradient checkpointing, by
LoRA, on two cards; and articles summed up by the library's classes and by stock transformers'.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from finetuning_cases import parameters
from generation_cases import Worker, request
from rows_of import forked, gang, values_of

from workloads import finetuning, text_generation
from workloads.base import MeasureSettings, Request
from workloads.devices import device_for
from workloads.engines.optimum_habana import prepare

DATA = "cnn-dailymail-synthetic"
SIZES = {"source_prefix": "summarize: ", "max_source_length": 48}
CHECKPOINTED = {"gradient_checkpointing": True}


def training(batch_size: int, **given: Any) -> Request:
    """A job of three steps after three of warm-up."""
    asked = {"max_length": 512, "method": "full", "learning_rate": 1e-3, "max_target_length": 24}
    job = request(DATA, model="tiny-t5", engine="optimum-habana", precision="fp32")
    return replace(
        job,
        workload="finetuning",
        batch_size=batch_size,
        parameters=parameters(steps=3, samples=16, **SIZES, **(asked | given)),
        measure=MeasureSettings(warmup=1, time_limit_s=600),
        settings={},
    )


def summing_up(**given: Any) -> Request:
    """A job that writes 12 tokens for each of three articles, two at a time."""
    fields = {"model": "tiny-t5", "precision": "fp32", "prompts": 3, "output_tokens": 12}
    return request(DATA, **(fields | {"ignore_eos": True} | SIZES | given))


def stock() -> dict[str, Any]:
    """The same articles summed up by transformers' own classes, before the library patches them."""
    return values_of(text_generation.run(summing_up(attention="eager"), Worker().context()))


def main() -> None:
    import torch

    torch.set_num_threads(1)
    done: dict[str, Any] = {"stock": forked(stock).recv()}
    device = device_for("hpu")
    prepare(device)
    done["gang"] = gang(finetuning.run, training(2, **CHECKPOINTED), Worker().context())

    def run(workload: Any, job: Request) -> dict[str, Any]:
        return values_of(workload(job, replace(Worker().context(), device=device)))

    done["full"] = run(finetuning.run, training(4))
    done["checkpointed"] = run(finetuning.run, training(4, **CHECKPOINTED))
    done["lora"] = run(finetuning.run, training(4, method="lora", learning_rate=1e-2))
    bf16 = {"precision": "bf16"}
    done["written"] = run(text_generation.run, summing_up(engine="optimum-habana"))
    done["written in bf16"] = run(text_generation.run, summing_up(engine="optimum-habana", **bf16))
    print("ROWS", json.dumps(done), flush=True)


main()
