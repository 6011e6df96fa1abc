"""Quantization as a step: a model in fewer bits, compared with itself, and kept for other jobs.

The plain model reads the held-out examples and, for the correction of biases, the calibration
texts; then the same checkpoint is loaded into fewer bits and reads them again. The difference of
losses, and the share of predictions that stay, say what the bits were worth. How fast the result is
say the jobs that run it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads import precision as precisions
from workloads import weights
from workloads.base import (
    BadConfiguration,
    JobContext,
    JobDescription,
    Request,
    Result,
    Sample,
    Unsupported,
    require,
)
from workloads.bias_correction import correct_biases, mean_outputs
from workloads.data.catalog import load_dataset
from workloads.data.examples import Example, text_of
from workloads.models.loading import ModelSource, load_config, load_tokenizer, open_model
from workloads.models.saved import origin_by, save_trained
from workloads.quantizers import learn_rounding, library_config
from workloads.registry import find_workload, task_for
from workloads.rules import refusals
from workloads.static_activations import NOTED, Ranges, forget_ranges, measure_ranges, use_ranges
from workloads.training.reading import split
from workloads.training.rows import padded
from workloads.training.samples import NOT_LEARNED, TrainingSample, encode_samples
from workloads.workloads.quantization import QuantizationParameters

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device

#: The precision of jobs that run a model stored in these numbers.
PRECISION = {"int8": "int8", "fp8": "fp8", "int4": "int4", "nf4": "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """Loss and predictions of a model on the held-out examples."""

    loss: float
    predictions: torch.Tensor  # the likeliest token at every learned position


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """Texts to calibrate with, and samples to compare both models on."""

    texts: list[list[int]]  # ids
    samples: Sequence[TrainingSample]
    synthetic: bool  # the dataset is


def run(request: Request, context: JobContext) -> Result:
    """Quantise, compare and keep; see ``workloads.base.Workload``."""
    with contextlib.ExitStack() as ending:
        return _run(request, context, ending)


def _run(request: Request, context: JobContext, ending: contextlib.ExitStack) -> Result:
    import torch

    parameters = QuantizationParameters.model_validate(dict(request.parameters))
    device = context.device
    _require(request, device)
    context.enter_phase("load")
    context.resident(f"{request.residency_key}|quantised", lambda: None)  # others make room
    device.release_memory()
    device.seed(0)
    began = context.clock()
    source = open_model(request.model)
    if getattr(load_config(source), "quantization_config", None):
        raise BadConfiguration(f"{request.model} is quantised already")
    load = task_for(request.workload, source.entry).function("load")
    tokenizer = load_tokenizer(source)
    inputs = _inputs(request, parameters, source, tokenizer)
    dtype = precisions.compute_dtype(request.precision)
    plain = load(source, **{precisions.dtype_keyword(): dtype}).to(device.torch_device).eval()
    before = weights.inspect(plain, request.precision, device.name)
    load_s = context.clock() - began
    plain_read = read(plain, inputs.samples, request.batch_size, device)

    context.enter_phase("measure")
    began, cpu_began = context.clock(), context.cpu_clock()
    outputs = mean_outputs(plain, inputs.texts, device) if parameters.bias_correction else {}
    if parameters.bias_correction and not outputs:
        raise Unsupported(f"bias_correction: no linear layer of {request.model} has a bias")
    ranges = measure_ranges(plain, inputs.texts, device) if parameters.method == "static" else {}
    made, extra = source, {}
    if parameters.method == "auto-round":
        learned = learn_rounding(plain, tokenizer, parameters, inputs.texts, ending)
        made = replace(source, path=str(learned), opening=None)  # what it wrote lies in the clear
    else:
        extra = {"quantization_config": library_config(parameters, dtype)}
    del plain  # the only reference: the next model takes its memory
    gc.collect()
    device.release_memory()
    model = load(
        made,
        device_map={"": device.torch_device},
        **{precisions.dtype_keyword(): dtype},
        **extra,
    ).eval()
    static = use_ranges(model, ranges) if ranges else 0
    corrected = correct_biases(model, outputs)
    device.synchronize()
    wall_s, cpu_s = context.clock() - began, context.cpu_clock() - cpu_began

    after = weights.inspect(model, PRECISION[parameters.numbers], device.name)
    found = read(model, inputs.samples, request.batch_size, device)
    details = {
        "quantization": f"{parameters.method}, {parameters.numbers}",
        "architecture": type(model).__name__,
    }
    if ranges:
        details["static_activations"] = f"{static} layers multiply in int8"
    if parameters.bias_correction:
        details["bias_correction"] = f"{corrected} layers with a bias"
    if parameters.save_model and not request.probe:
        context.enter_phase("finish")
        name, how = parameters.save_model, details["quantization"]
        origin = _origin(request, parameters, how, ranges)
        forget_ranges(model)
        written = _written(made, source)
        details["saved_model"] = str(save_trained(model, source, name, origin, written=written))
    same = (found.predictions == plain_read.predictions).float().mean()
    return Result(
        samples=(_sample(inputs.texts, wall_s, cpu_s),),
        stop_reason="max_repeats",
        load_s=load_s,
        weight_bytes=after.weight_bytes,
        parameter_count=after.parameter_count,
        random_weights=source.random_weights,
        synthetic_data=inputs.synthetic,
        precision_detail=f"{details['quantization']}; the rest in {request.precision}",
        metrics={
            "quantize_s": wall_s,
            "model_bytes_before": float(before.weight_bytes),
            "model_bytes_after": float(after.weight_bytes),
            "held_out_loss_before": plain_read.loss,
            "held_out_loss": found.loss,
            "token_agreement": float(torch.as_tensor(same)),
            "corrected_layers": float(corrected),
        },
        details=details,
    )


def _inputs(
    request: Request, parameters: QuantizationParameters, source: ModelSource, tokenizer: Any
) -> _Inputs:
    """Calibration texts, where the method reads any, and held-out samples of the dataset."""
    dataset = load_dataset(request.dataset, parameters.reading())
    rest, held = split(dataset.examples, parameters.held_out, request.dataset)
    texts = (
        calibration_texts(rest, tokenizer, parameters.samples, parameters.length)
        if parameters.reads_texts
        else []
    )
    samples = encode_samples(held, len(held), tokenizer, source, parameters.length)
    return _Inputs(texts=texts, samples=samples, synthetic=dataset.synthetic)


def _sample(texts: Sequence[Sequence[int]], wall_s: float, cpu_s: float) -> Sample:
    """The one sample of a job: quantising, with the calibration texts that it read."""
    return Sample(
        repeat=0,
        batch=0,
        warmup=False,
        complete=True,
        wall_s=wall_s,
        cpu_s=cpu_s,
        items=len(texts),
        input_tokens=sum(map(len, texts)),
        output_tokens=0,
        computed_tokens=0,
    )


def _origin(
    request: Request, parameters: QuantizationParameters, how: str, ranges: Ranges
) -> dict[str, Any]:
    """The record of how a model was made, kept beside it."""
    return {
        **origin_by(request),
        "quantization": how,
        "precision": PRECISION[parameters.numbers],
        **({NOTED: ranges} if ranges else {}),
    }


def _require(request: Request, device: Device) -> None:
    spec = find_workload(request.workload)
    asked = JobDescription(
        model=request.model,
        dataset=request.dataset,
        precision=request.precision,
        device=device.name,
        batch_size=request.batch_size,
        cards=1,
        parameters={**request.parameters, **request.settings},
        engine=request.engine,
    )
    require(refusals(spec, asked))


def calibration_texts(
    examples: Sequence[Example], tokenizer: Any, count: int, length: int
) -> list[list[int]]:
    """Ids of ``count`` texts of exactly ``length`` tokens: the examples, one after the other.

    Raises:
        BadConfiguration: the examples have fewer tokens.
    """
    ids: list[int] = []
    for example in examples:
        ids += tokenizer(text_of(example), add_special_tokens=False)["input_ids"]
        if len(ids) >= count * length:
            return [ids[start : start + length] for start in range(0, count * length, length)]
    raise BadConfiguration(
        f"{count} calibration texts of {length} tokens are {count * length:,} tokens, and the "
        f"dataset has {len(ids):,}; write fewer samples, or a smaller length"
    )


def read(model: Any, samples: Sequence[TrainingSample], batch: int, device: Device) -> _Read:
    """Loss and predictions of a model at the learned positions of samples."""
    import torch

    total, predictions = 0.0, []
    with torch.no_grad():
        for start in range(0, len(samples), batch):
            inputs = padded(samples[start : start + batch], 0)
            given = {n: t.to(device.torch_device) for n, t in inputs.arguments().items()}
            logits = model(**given, use_cache=False).logits[:, :-1].float()
            labels = inputs.labels[:, 1:].to(logits.device)
            here = labels != NOT_LEARNED
            loss = torch.nn.functional.cross_entropy(logits[here], labels[here], reduction="sum")
            total += float(loss)
            predictions.append(logits[here].argmax(-1).cpu())
    found = torch.cat(predictions)
    return _Read(loss=total / max(len(found), 1), predictions=found)


def _written(made: ModelSource, source: ModelSource) -> Path | None:
    """The directory that a library has written a model into; None: it is in memory alone."""
    return Path(made.path) if made is not source else None
