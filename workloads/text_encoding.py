"""Text encoding: texts per second of an encoder such as BERT.

One forward pass per batch is timed, to the logits of every token; tokenization and padding are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from workloads.base import (
    NOT_FINITE,
    OTHER_OUTPUTS,
    SAMPLES,
    JobContext,
    Metric,
    Request,
    Result,
)
from workloads.bench.measure import Observation, load_resident, measure_resident
from workloads.bench.warmup import WarmupPlan
from workloads.data.datasets import DatasetParameters, load_dataset
from workloads.devices import device_for
from workloads.engines import engine_function
from workloads.models import attention
from workloads.quality import METRICS, spared
from workloads.registry import WorkloadSpec
from workloads.settings import amount, choice, neutral

if TYPE_CHECKING:
    from workloads.engines.torch_models import LoadedEncoder


class TextEncodingParameters(DatasetParameters):
    """Forward passes of an encoder over the texts of a dataset."""

    texts: int = amount(
        128,
        description="How many texts of the dataset are read in a repeat, from its start again "
        "where it is shorter.",
    )
    max_length: int = amount(
        128, ge=2, description="Most tokens of a text; a longer one is cut at its end."
    )
    attention: Literal["sdpa", "eager", "flash_attention_2", "xformers"] = choice(
        "sdpa",
        loads=True,
        description="Attention implementation: sdpa is PyTorch's scaled_dot_product_attention "
        "(eager where a class has none, and the row says so), eager plain matrix products, "
        "flash_attention_2 and xformers the kernels of those packages (CUDA only).",
    )
    quality: bool = neutral(
        False,
        description="Compare the logits of 8 texts with those of the plain path (transformers in "
        "fp32 on the host, one text at a time), after the timed part.",
    )


#: Texts that are compared, and the distance from which a row is flagged.
_COMPARED, _FAR = 8, 0.5

SPEC = WorkloadSpec(
    name="text-encoding",
    function="workloads.text_encoding:run",
    parameters=TextEncodingParameters,
    summary="Forward passes of an encoder (BERT) over texts: samples/s.",
    ability="encode",
    tasks=("masked-lm",),
    dataset="english-corpus-synthetic",
    throughput=SAMPLES,
    metrics=(
        *(one for one in METRICS if one.name in ("quality_top1_agreement", "quality_kl")),
        Metric(
            name="quality_logit_error",
            title="error of logits",
            description="Norm of the difference of the compared texts' logits from the plain "
            "path's, over the norm of those less their mean.",
            better="lower",
        ),
    ),
    refuse=lambda job: tuple(attention.refusals(job)),
)


def run(request: Request, context: JobContext) -> Result:
    """Measure text encoding; see ``workloads.base.Workload``."""
    parameters = TextEncodingParameters.model_validate(dict(request.parameters))
    context.device.seed(0)
    context.enter_phase("load")
    load = engine_function(request.engine, "encode", context.device.name)
    resident, load_s = load_resident(request, context, load)
    encoder: LoadedEncoder = resident.engine
    dataset = load_dataset(request.dataset, parameters.reading())
    began = context.clock()
    size, examples = request.batch_size, dataset.examples
    total = max(parameters.texts, size * context.world_size)
    texts = [
        encoder.ids(examples[index % len(examples)].content, parameters.max_length)
        for index in range(context.rank, total, context.world_size)
    ]
    tokenization_s = context.clock() - began
    batches = [texts[start : start + size] for start in range(0, len(texts), size)]
    prepared = [encoder.prepare(batch) for batch in batches]
    shapes = [(len(batch), max(map(len, batch))) for batch in batches]
    context.device.release_memory()
    context.device.reset_peak_memory()

    def run_batch(repeat: int, batch: int) -> Callable[[], Observation]:
        encoder.logits(prepared[batch])
        context.device.synchronize()
        observed = Observation(
            items=len(batches[batch]),
            input_tokens=sum(map(len, batches[batch])),
            computed_tokens=math.prod(shapes[batch]),
        )
        return lambda: observed

    plan = WarmupPlan(shapes=shapes)
    _, result = measure_resident(
        resident, context, run_batch, len(batches), request.measure, plan=plan
    )
    finite = request.probe or bool(encoder.logits(prepared[0]).isfinite().all())
    flag = {} if finite else {NOT_FINITE: "logits of its first batch are infinite or no numbers"}
    metrics: dict[str, float] = {}
    if parameters.quality and finite and not request.probe:
        name = f"quality on {request.dataset} {parameters.reading()} {parameters.max_length}"
        try:
            if name not in resident.known:
                resident.known[name] = _quality(encoder, texts[:_COMPARED], request)
            metrics, compared = resident.known[name]
        except Exception as error:
            compared = {"quality": f"not compared: {spared(error, context)}"}
        flag |= compared
    return replace(
        result,
        metrics={**result.metrics, **metrics},
        load_s=load_s,
        tokenization_s=tokenization_s,
        synthetic_data=dataset.synthetic,
        details={**result.details, **dataset.details, **flag},
    )


def _quality(
    encoder: LoadedEncoder, texts: list[list[int]], request: Request
) -> tuple[dict[str, float], dict[str, str]]:
    """Compare an encoder with the plain path; figures and details, a flag among them."""
    import torch

    if encoder.details.get("new_weights"):
        return {}, {"quality": "not compared: weights that the checkpoint lacks are drawn anew"}
    alike = replace(request, engine="transformers", precision="fp32", settings={})
    alike = replace(alike, parameters={**request.parameters, "attention": "eager"})
    host = device_for("cpu")
    plain: LoadedEncoder = engine_function("transformers", "encode", "cpu")(alike, host)
    rows = encoder.logits(encoder.prepare(texts))
    mine = torch.cat([row[: len(t)].float().cpu() for row, t in zip(rows, texts, strict=True)])
    theirs = torch.cat([plain.logits(plain.prepare([text]))[0].float() for text in texts])
    known, log_known = theirs.softmax(-1), theirs.log_softmax(-1)
    error = float((mine - theirs).norm() / (theirs - theirs.mean(-1, keepdim=True)).norm())
    details = {"quality": f"compared with the plain path on {len(texts)} texts"}
    if error > _FAR:
        details[OTHER_OUTPUTS] = f"its logits are off by {error:.0%} of the plain path's"
    return {
        "quality_top1_agreement": float((mine.argmax(-1) == theirs.argmax(-1)).float().mean()),
        "quality_kl": max(float((known * (log_known - mine.log_softmax(-1))).sum(-1).mean()), 0.0),
        "quality_logit_error": error,
    }, details
