"""Fine-tuning: samples per second by method and technique.

A training step takes about three times the arithmetic of the forward pass, and memory for weights,
gradients, optimizer state and activations. Methods train less (adapters) or store less (4 bits);
techniques trade arithmetic for memory. The rules here cover methods, precisions and adapters; each
technique has its own. The engine is Nightgrid's loop (``training/loop.py``) or a library's trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from workloads.base import (
    SAMPLES,
    BadConfiguration,
    JobContext,
    JobDescription,
    Refusal,
    Request,
    Result,
    Workload,
)
from workloads.data.datasets import learning_notes, learning_refusals
from workloads.engines import engine_function, trains_by_library
from workloads.models import rules
from workloads.models.catalog import known_config, positions_of
from workloads.models.precision import quantized, support
from workloads.models.prompts import prompt_notes, prompt_refusals
from workloads.models.rules import saving_refusals, too_long
from workloads.registry import WorkChange, WorkloadSpec, find_workload
from workloads.rules import require_allowed
from workloads.training.methods import ADAPTER_METHODS, MethodParameters, method_of
from workloads.training.pairs import Seq2SeqParameters, source_length, target_length
from workloads.training.techniques import (
    technique_metrics,
    technique_notes,
    technique_refusals,
    with_techniques,
)

#: Precisions in which weights can be trained, or carry an adapter, without quantization.
TRAINED_IN = ("fp32", "fp16", "bf16")


def refuse(job: JobDescription) -> tuple[Refusal, ...]:
    """Objections to a job beyond those of its engine and model."""
    method = method_of(job.parameters)
    return (
        *_precision(job, method),
        *_adapter(job, method),
        *_saving(job, method),
        *_lengths(job),
        *learning_refusals(job),
        *prompt_refusals(job),
        *technique_refusals(job),
    )


def _precision(job: JobDescription, method: MethodParameters) -> Iterator[Refusal]:
    precision = job.precision
    if quantized(precision):
        base, hint = f"{precision} base is not built", ""
        if precision == "int4":
            base, hint = "4-bit base is method qlora", "write precision: bf16 and method: qlora"
        yield Refusal(
            setting="precision",
            reason=f"weights in {precision} have no gradients; an adapter over a {base}",
            hint=hint,
            unsupported=True,
        )
    elif precision == "fp16" and method.method not in ADAPTER_METHODS:
        yield half_weights(f"method {method.method}")
    if method.method == "qlora" and not (nf4 := support("int4", job.device)).supported:
        yield Refusal(setting="method", reason=f"qlora: {nf4.reason}", unsupported=True)


def half_weights(who: str) -> Refusal:
    """An objection to updating fp16 weights."""
    return Refusal(
        setting="precision",
        reason=f"{who} would update fp16 weights, whose small changes become 0; loss scaling wants "
        "fp32 weights",
        hint="write precision: fp32 and autocast: fp16",
    )


def _adapter(job: JobDescription, method: MethodParameters) -> Iterator[Refusal]:
    if method.method not in ADAPTER_METHODS:
        for name in ("rank", "alpha", "targets", "save_adapter"):
            if getattr(method, name) is not None:
                reason = f"method {method.method} has no adapter"
                hint = f"leave {name} out, or choose one of {', '.join(ADAPTER_METHODS)}"
                yield Refusal(setting=name, reason=reason, hint=hint)
        return
    if method.method == "vera" and method.alpha is not None:
        reason = "vera scales by vectors that it learns and has no alpha"
        yield Refusal(setting="alpha", reason=reason, hint="leave alpha out")
    there = rules.linear_names(job.model) if method.targets is not None else None
    if method.targets is None or there is None:
        return  # the job itself will look
    try:
        rules.choose(method.targets, there)
    except BadConfiguration as error:
        reason, _, hint = str(error).removeprefix("targets: ").partition("; ")
        yield Refusal(setting="targets", reason=reason, hint=hint)


def _saving(job: JobDescription, method: MethodParameters) -> Iterator[Refusal]:
    """Refuse to save models with partial weights or formats that no checkpoint has."""
    if method.save_model is None:
        return
    yield from saving_refusals(job.model, method.save_model)
    if method.method in ADAPTER_METHODS:
        yield Refusal(
            setting="save_model",
            reason=f"method {method.method} trains an adapter over a model that stays as it is",
            hint="write save_adapter, or method: full",
        )
    elif method.method == "qat":
        yield Refusal(
            setting="save_model",
            reason="method qat ends in int4 weights, which this version keeps in no checkpoint",
            hint="train with method: full and quantise in a job of workload: quantization",
        )


def _lengths(job: JobDescription) -> Iterator[Refusal]:
    config = known_config(job.model) or {}
    if (positions := positions_of(config)) is None:
        return
    given = job.parameters
    if config.get("is_encoder_decoder"):
        yield from too_long("max_source_length", source_length(given), positions)
        yield from too_long("max_target_length", target_length(given), positions)
    else:
        yield from too_long("max_length", int(given["max_length"]), positions)


TASKS = ("causal-lm", "seq2seq-lm")


class _Parameters(Seq2SeqParameters, MethodParameters):
    """Fine-tuning of a language model, by a method and with techniques."""


FinetuningParameters = with_techniques("FinetuningParameters", _Parameters, TASKS)

#: The trainer's own default clipped at 1; ChatGLM3's fused layer had one adapter of q, k and v.
_AS_EVERYWHERE = WorkChange(
    what="optimum-habana clips and adapts by default as every engine does",
    concerns=lambda engine, given: (
        trains_by_library(engine)
        and (given.get("max_gradient_norm") is None or given.get("targets") is None)
    ),
)
_WITHIN_SUPPORT = WorkChange(
    what="teacher_logits: kept compares both models over the logits that are kept",
    concerns=lambda _, given: given.get("teacher_logits") == "kept",
)

SPEC = WorkloadSpec(
    name="finetuning",
    function="workloads.finetuning:run",
    also_called=("training", "train", "sft", "lora", "qlora"),
    parameters=FinetuningParameters,
    summary="Fine-tuning of a language model by method and technique: samples/s, loss.",
    ability="train",
    tasks=TASKS,
    throughput=SAMPLES,
    metrics=technique_metrics(TASKS),
    work_changes=(_AS_EVERYWHERE, _WITHIN_SUPPORT),
    refuse=refuse,
    notes=lambda job: (*learning_notes(job), *prompt_notes(job), *technique_notes(job)),
)


def run(request: Request, context: JobContext) -> Result:
    """Measure fine-tuning; see ``workloads.base.Workload``."""
    spec = find_workload(request.workload)
    parameters = spec.parameters.model_validate(dict(request.parameters)).model_dump()
    request = replace(request, parameters=parameters)
    require_allowed(request, context.device.name, context.world_size)
    train: Workload = engine_function(request.engine, "train", context.device.name)
    return train(request, context)
