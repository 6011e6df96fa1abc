"""Rules of pipelines: how layers divide, how many micro-batches fill the stages. Pure, no torch.

Between two stages travel hidden states of one fixed shape, so every sample is padded to
``max_length``. The schedules are PyTorch's: 1F1B wants a micro-batch for each stage, the
interleaved one a multiple of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workloads.base import JobDescription, Refusal
from workloads.finetuning_method import method_name
from workloads.parallel.layout import pipeline_size, tensor_size
from workloads.parallel.tensor_rules import model_config

#: Groups of layers that each card holds under the interleaved schedule, unless told.
CHUNKS = 2

_PADDED = ("dynamic", "fixed")


def idle_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Share of the cards' time in which a pipeline fills and drains, if all stages take equally
    long; with several groups of layers a card it fills in smaller steps."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)


def chunks_of(parameters: Mapping[str, Any]) -> int:
    """Number of groups of layers that each card of a job's pipeline holds."""
    if parameters.get("pipeline_schedule") != "interleaved":
        return 1
    return int(parameters.get("pipeline_chunks") or CHUNKS)


def note(asked: JobDescription) -> str:
    """One line of the plan about a pipeline; empty without one."""
    stages = pipeline_size(asked.parameters, asked.cards)
    if stages < 2:
        return ""
    micro_batches, chunks = asked.parameters["gradient_accumulation"], chunks_of(asked.parameters)
    share = idle_share(stages, micro_batches, chunks)
    by_chunks = f" of {chunks} groups of layers each" if chunks > 1 else ""
    return (
        f"pipeline_parallel {stages} with {micro_batches} micro-batches"
        f" (gradient_accumulation){by_chunks}: idle share (p-1)/(m"
        f"{'v' if chunks > 1 else ''}+p-1) = {share:.1%}"
    )


def layout_refusals(asked: JobDescription) -> Iterator[Refusal]:
    """Objections to data × tensor × pipeline that is not the number of cards."""
    given = {
        "data_parallel": asked.parameters.get("data_parallel"),
        "tensor_parallel": asked.parameters.get("tensor_parallel"),
        "pipeline_parallel": asked.parameters.get("pipeline_parallel"),
    }
    tensor = tensor_size(asked.parameters, asked.cards)
    stages = pipeline_size(asked.parameters, asked.cards)
    data = int(given["data_parallel"] or max(asked.cards // (tensor * stages), 1))
    if data * tensor * stages == asked.cards:
        return
    blamed = next((name for name in reversed(given) if (given[name] or 1) > 1), "strategy")
    fixed = given["pipeline_parallel"] or asked.parameters.get("strategy") != "pipeline"
    if blamed == "data_parallel" and fixed and asked.cards % (tensor * stages) == 0:
        hint = f"write data_parallel: {asked.cards // (tensor * stages)}, or leave it out"
    else:
        hint = (
            "the product of data_parallel, tensor_parallel and pipeline_parallel has to be "
            f"{asked.cards}"
        )
    yield Refusal(
        setting=blamed,
        reason=f"data {data} × tensor {tensor} × pipeline {stages} is {data * tensor * stages} "
        f"cards, and the job has {asked.cards}",
        hint=hint,
    )


def pipeline_refusals(asked: JobDescription) -> Iterator[Refusal]:
    """Objections to the stages of a job with strategy pipeline, whose layout is right."""
    parameters = asked.parameters
    stages, chunks = pipeline_size(parameters, asked.cards), chunks_of(parameters)
    if stages < 2:
        return
    yield from _layers(asked, stages, chunks)
    yield from _micro_batches(parameters["gradient_accumulation"], stages, chunks)
    if parameters.get("padding", "dynamic") not in _PADDED:
        yield Refusal(
            setting="padding",
            reason="the stages of a pipeline exchange tensors of one shape, so every sample is "
            "padded to max_length",
            hint="write padding: fixed",
        )
    lacking = {
        "method": (method_name(parameters), ("full", "lora")),
        "autocast": (parameters.get("autocast", "none"), ("none", "bf16")),
        "logits": (parameters.get("logits", "all"), ("all",)),
        "save_adapter": (parameters.get("save_adapter"), (None,)),
        "profile": (bool(parameters.get("profile")), (False,)),
        "freeze_layers": (parameters.get("freeze_layers") or 0, (0,)),
        "freeze_embeddings": (bool(parameters.get("freeze_embeddings")), (False,)),
    }
    for name, (value, possible) in lacking.items():
        if value not in possible:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Refusal(
                setting=name,
                reason=f"this version has no {name} {shown} over the stages of a pipeline",
                hint="write strategy: ddp",
                unsupported=True,
            )


def _layers(asked: JobDescription, stages: int, chunks: int) -> Iterator[Refusal]:
    config = model_config(asked.model)
    if config is None:
        return  # the job itself will look
    layers = config.get("num_hidden_layers")
    parts = stages * chunks
    if isinstance(layers, int) and layers % parts:
        groups = f" of {chunks} groups of layers each" if chunks > 1 else ""
        possible = [n for n in range(1, layers + 1) if layers % (n * chunks) == 0]
        yield Refusal(
            setting="pipeline_parallel" if asked.parameters["pipeline_parallel"] else "strategy",
            reason=f"the model's {layers} layers cannot be cut into {stages} equal stages{groups}",
            hint=f"pipeline_parallel can be {', '.join(map(str, possible))}"
            if possible
            else f"write a pipeline_chunks that divides {layers}",
        )
    if config.get("tie_word_embeddings"):
        yield Refusal(
            setting="strategy",
            reason=f"the output layer of {asked.model} is its embedding, which would lie in two "
            "stages of a pipeline; this version ties no weights over cards",
            hint="write strategy: ddp",
            unsupported=True,
        )


def _micro_batches(count: int, stages: int, chunks: int) -> Iterator[Refusal]:
    if count < stages or (chunks > 1 and count % stages):
        wanted = (
            f"a multiple of the {stages} stages"
            if chunks > 1
            else f"at least one for each of the {stages} stages"
        )
        yield Refusal(
            setting="gradient_accumulation",
            reason=f"{count} micro-batch{'es' if count > 1 else ''} cannot fill the pipeline, "
            f"which takes {wanted}",
            hint=f"write gradient_accumulation: {4 * stages}, say, for an idle share of "
            f"{idle_share(stages, 4 * stages, chunks):.0%}",
        )
