"""Quantization: a model in fewer bits, compared with the plain one and saved for other jobs.

Both read the held-out examples; the row has the difference of losses and the share of equal
predictions. Jobs that run the result measure its speed.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from workloads.base import (
    SAMPLES,
    BadConfiguration,
    JobContext,
    JobDescription,
    Metric,
    Refusal,
    Request,
    Result,
    Unsupported,
    WorkloadError,
    whole_sample,
)
from workloads.compression.calibration import (
    RangeMethod,
    add_biases,
    correct_outputs,
    mean_error,
    narrowed,
    output_moments,
)
from workloads.data.cache import cache_root
from workloads.data.datasets import DatasetParameters, find_dataset, load_dataset, load_examples
from workloads.data.shapes import Example, text_of
from workloads.devices import device_spec
from workloads.models import precision as precisions
from workloads.models.catalog import known_config
from workloads.models.loading import load_config, load_tokenizer, open_model
from workloads.models.precision import (
    RANGES_NOTE,
    Ranges,
    forget_ranges,
    measure_ranges,
    use_ranges,
)
from workloads.models.products import origin_by, save_trained
from workloads.models.random_weights import PREFIX
from workloads.models.rules import is_protected, saving_refusals, undivided_layer
from workloads.registry import WorkChange, WorkloadSpec, task_for
from workloads.rules import require_allowed
from workloads.settings import amount, work
from workloads.training.data import NOT_LEARNED, TrainingSample, encode_samples, padded, split
from workloads.training.methods import SAVE_MODEL

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device

#: Why methods are unavailable here.
_LACKING = {
    "gptq": "gptqmodel comes without wheels and needs a compiler",
    "awq": "AutoAWQ is not maintained any more and does not import beside this transformers",
}

#: Formats of the methods that have only one.
_STORES = {"static": "int8", "auto-round": "int4", "gptq": "int4", "awq": "int4"}


class QuantizationParameters(DatasetParameters):
    """One model in fewer bits, and what that costs in quality."""

    method: Literal["weight-only", "static", "auto-round", "gptq", "awq"] = work(
        "weight-only",
        description="weight-only rounds every weight to the nearest number; static (int8) rounds "
        "activations too, in ranges that the calibration texts have, and multiplies in int8; "
        "auto-round learns how to round from those texts (package auto-round).",
    )
    calibration_method: RangeMethod = work(
        "minmax",
        description="How static chooses each layer's input range on the calibration texts: minmax "
        "up to the largest value, percentile without the largest of 10,000, mse with the least "
        "squared error, divergence with the least change of the values' distribution.",
    )
    numbers: Literal["int8", "fp8", "int4", "nf4"] = work(
        "int8",
        description="Numbers that linear layers are stored in: int8 and fp8 (e4m3) with a scale a "
        "channel, int4 with one a group (torchao); nf4, the quantiles of a normal distribution, "
        "with one for every 64 weights (bitsandbytes). Jobs with the model write precision: int8, "
        "fp8 or int4.",
    )
    group_size: int | None = work(
        None, ge=8, description="Weights that share one scale, for int4. Left out: 32."
    )
    iters: int | None = work(
        None,
        ge=0,
        description="Steps in which auto-round learns to round each block; 0 rounds at once. Left "
        "out: 200.",
    )
    bias_correction: bool = work(
        False,
        description="Add to each layer's bias what its mean output lost on the calibration texts; "
        "layers get a bias where the model's configuration has a switch for it, others stay as "
        "they are.",
    )
    variance_correction: bool = work(
        False,
        description="Scale each row of a quantised layer so that its outputs vary on the "
        "calibration texts as those of the plain layer do (int8, fp8 and int4).",
    )
    samples: int = amount(
        32,
        description="Calibration texts, of the first examples of the dataset, one after the other.",
    )
    length: int = amount(256, ge=8, description="Tokens of each calibration text.")
    held_out: int = work(
        16,
        ge=1,
        le=10_000,
        description="Examples, the last of the dataset, on which the model is compared before and "
        "after: loss, and share of equal predictions.",
    )
    save_model: str | None = SAVE_MODEL

    @property
    def reads_texts(self) -> bool:
        """Tell if calibration texts are used."""
        return self.method in ("static", "auto-round") or self.corrects

    @property
    def corrects(self) -> bool:
        """Tell if outputs are corrected after quantization."""
        return self.bias_correction or self.variance_correction


def refuse(job: JobDescription) -> tuple[Refusal, ...]:
    """Objections to a job beyond those of its engine and model."""
    parameters = QuantizationParameters.model_validate(dict(job.parameters))
    return (*_method(job, parameters), *_model(job, parameters), *_texts(job, parameters))


def _method(job: JobDescription, parameters: QuantizationParameters) -> Iterator[Refusal]:
    method, numbers, device = parameters.method, parameters.numbers, device_spec(job.device)
    if method in _LACKING:
        hint = "write method: auto-round, whose checkpoints are packed alike"
        yield Refusal(setting="method", reason=_LACKING[method], hint=hint, unsupported=True)
    stores = _STORES.get(method, numbers)
    learns = method == "auto-round"
    wrong: dict[str, tuple[str, str]] = {}  # setting -> reason, hint
    if numbers != stores:
        wrong["numbers"] = f"{method} stores {stores}, not {numbers}", f"write numbers: {stores}"
    if not learns and parameters.iters is not None:
        wrong["iters"] = f"{method} learns nothing", "leave it out, or write method: auto-round"
    if method != "static" and parameters.calibration_method != "minmax":
        reason = f"{method} has no ranges of activations"
        wrong["calibration_method"] = reason, "leave it out, or write method: static"
    if parameters.group_size is not None and numbers != "int4":
        reason = f"{numbers} has no groups to choose"
        wrong["group_size"] = reason, "leave it out, or write numbers: int4"
    if job.cards > 1:
        wrong["cards"] = "one card quantises a model", "write cards: 1"
    if isinstance(job.batch_size, str):
        reason = "nothing is searched here: it is the held-out texts at once"
        wrong["batch_size"] = reason, "write a number"
    if parameters.variance_correction and numbers == "nf4":
        reason = "nf4 has scales of blocks, not of rows"
        wrong["variance_correction"] = reason, "write numbers: int4"
    for name in ("bias_correction", "variance_correction"):
        if learns and getattr(parameters, name):  # its model is read back from its directory
            reason = "auto-round writes the model itself, and corrected layers would not be in it"
            wrong[name] = reason, "leave it out, or write method: weight-only"
    hint = "or write method: weight-only"
    if learns and job.model.startswith(PREFIX):
        reason = f"{job.model} has no weights to read back from files, as auto-round does"
        wrong["model"] = reason, f"name a checkpoint, {hint}"
    if learns and is_protected(job.model):
        reason = f"{job.model} is protected, and auto-round writes weights in the clear"
        wrong["model"] = reason, f"name the model as it was before `nightgrid protect`, {hint}"
    for setting_name, (reason, hint) in wrong.items():
        yield Refusal(setting=setting_name, reason=reason, hint=hint)
    if not device.can("dynamic_shapes"):
        reason = f"torchao and bitsandbytes have no kernels for {device.title}"
        hint = "quantise on a CPU or a CUDA card"
        yield Refusal(setting="numbers", reason=reason, hint=hint, unsupported=True)


def _model(job: JobDescription, parameters: QuantizationParameters) -> Iterator[Refusal]:
    yield from saving_refusals(job.model, parameters.save_model)
    if job.precision not in ("fp32", "bf16", "fp16"):
        reason = f"{job.precision} is quantised; here it is the format of what is not"
        yield Refusal(setting="precision", reason=reason, hint="write precision: bf16 and numbers")
    if (known_config(job.model) or {}).get("quantization_config"):
        reason = f"{job.model} is quantised already"
        yield Refusal(setting="model", reason=reason, hint="name the model that it was made from")
    if parameters.numbers not in ("int4", "nf4"):
        return
    group = NF4_BLOCK if parameters.numbers == "nf4" else parameters.group_size or INT4_GROUP
    if undivided := undivided_layer(job.model, group):
        name, inputs = undivided
        yield Refusal(
            setting="group_size" if parameters.numbers == "int4" else "numbers",
            reason=f"groups of {group} do not divide the {inputs} inputs of {name}",
            hint="choose a group_size that divides them, or numbers: int8",
        )


def _texts(job: JobDescription, parameters: QuantizationParameters) -> Iterator[Refusal]:
    """Refuse too few texts, counting at least one byte per token."""
    needed = parameters.samples * parameters.length
    try:
        entry = find_dataset(job.dataset)
        if entry.kind == "hub":
            return
        examples = load_examples(job.dataset, parameters.reading())
    except (WorkloadError, OSError):
        return  # reading it says so
    if parameters.held_out >= len(examples):
        yield Refusal(
            setting="held_out",
            reason=f"{job.dataset} has {len(examples):,} examples, and none would be left to "
            "calibrate with",
            hint=f"write less than {len(examples):,}",
        )
        return
    if not parameters.reads_texts:
        return
    there = 0
    for example in examples[: len(examples) - parameters.held_out]:
        there += len(text_of(example).encode()) + 1
        if there >= needed:
            return
    yield Refusal(
        setting="samples",
        reason=f"{parameters.samples} texts of {parameters.length} tokens are {needed:,} tokens, "
        f"and what {job.dataset} has beside the held-out examples is {there:,} bytes",
        hint="write fewer samples, or a smaller length",
    )


SPEC = WorkloadSpec(
    name="quantization",
    function="workloads.quantization:run",
    parameters=QuantizationParameters,
    summary="A model in fewer bits, saved for other jobs: seconds, bytes, loss before and after.",
    ability="quantize",
    tasks=("causal-lm",),
    throughput=SAMPLES,
    metrics=(
        Metric(
            name="quantize_s",
            title="quantised in",
            unit="s",
            description="Seconds of loading and quantising, calibration included.",
            better="lower",
        ),
        Metric(
            name="model_bytes_before",
            title="before",
            unit="bytes",
            description="Bytes of all weights before, in the job's precision.",
        ),
        Metric(
            name="model_bytes_after",
            title="after",
            unit="bytes",
            description="Bytes of all weights after, with scales, as they are stored.",
            better="lower",
        ),
        Metric(
            name="held_out_loss_before",
            title="held-out loss before",
            description="Mean loss of the answers of the held-out examples before.",
        ),
        Metric(
            name="token_agreement",
            title="same predictions",
            description="Share of the answers' tokens at which both predict the same one.",
            better="higher",
            equal_from=0.95,
        ),
        Metric(
            name="corrected_layers",
            title="biases corrected",
            description="Layers whose bias was corrected.",
        ),
        Metric(
            name="scaled_layers",
            title="scales corrected",
            description="Layers whose rows were scaled to the plain layers' variance.",
        ),
        Metric(
            name="mean_error_before",
            title="error of means before",
            description="Mean absolute difference of channels' mean outputs from the plain "
            "model's on the calibration texts, before correction.",
        ),
        Metric(
            name="mean_error",
            title="error of means",
            description="The same after correction.",
            better="lower",
        ),
    ),
    work_changes=(
        WorkChange(
            what="bias_correction is computed through the quantised layers, in their order",
            concerns=lambda _, given: given.get("bias_correction") is True,
        ),
    ),
    refuse=refuse,
)


#: The precision of jobs that run a model stored in these numbers.
PRECISION = {"int8": "int8", "fp8": "fp8", "int4": "int4", "nf4": "int4"}


def run(request: Request, context: JobContext) -> Result:
    """Quantize, compare and save; see ``workloads.base.Workload``."""
    with contextlib.ExitStack() as ending:
        return _run(request, context, ending)


def _run(request: Request, context: JobContext, ending: contextlib.ExitStack) -> Result:
    import torch

    parameters = QuantizationParameters.model_validate(dict(request.parameters))
    device, size = context.device, request.batch_size
    require_allowed(request, device.name, 1)
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
    dataset = load_dataset(request.dataset, parameters.reading())
    rest, held_out = split(dataset.examples, parameters.held_out, request.dataset)
    texts: list[list[int]] = []
    if parameters.reads_texts:
        texts = calibration_texts(rest, tokenizer, parameters.samples, parameters.length)
    encoded = encode_samples(held_out, len(held_out), tokenizer, source, parameters.length)
    samples = cast("Sequence[TrainingSample]", encoded.samples)
    dtype = precisions.compute_dtype(request.precision)
    in_dtype = {precisions.dtype_keyword(): dtype}
    plain = load(source, **in_dtype).to(device.torch_device).eval()
    before = precisions.inspect(plain, request.precision, device.name)
    load_s = context.clock() - began
    loss_before, predictions_before = read(plain, samples, size, device)

    context.enter_phase("measure")
    began, cpu_began = context.clock(), context.cpu_clock()
    wanted = output_moments(plain, texts, device) if parameters.corrects else {}
    ranges: Ranges = {}
    if parameters.method == "static":
        ranges = measure_ranges(plain, texts, device)
        ranges = narrowed(plain, texts, device, ranges, parameters.calibration_method)
    made, written, extra = source, None, {}
    if parameters.method == "auto-round":
        written = learn_rounding(plain, tokenizer, parameters, texts, ending)
        made = replace(source, path=str(written), opening=None)  # what it wrote lies in the clear
    else:
        extra = {"quantization_config": library_config(parameters, dtype)}
    del plain  # the only reference: the next model takes its memory
    gc.collect()
    device.release_memory()
    model = load(made, device_map={"": device.torch_device}, **in_dtype, **extra).eval()
    static = use_ranges(model, ranges) if ranges else 0
    corrected = scaled = 0
    errors: dict[str, float] = {}
    if parameters.corrects:
        added = add_biases(model) if parameters.bias_correction else 0
        errors["mean_error_before"] = mean_error(output_moments(model, texts, device), wanted)
        kinds = {"mean": parameters.bias_correction, "variance": parameters.variance_correction}
        corrected, scaled = correct_outputs(model, wanted, texts, device, **kinds)
        errors["mean_error"] = mean_error(output_moments(model, texts, device), wanted)
        if parameters.bias_correction and not corrected:
            raise Unsupported(f"bias_correction: no linear layer of {request.model} has a bias")
    device.synchronize()
    wall_s, cpu_s = context.clock() - began, context.cpu_clock() - cpu_began

    stored_in = PRECISION[parameters.numbers]
    after = precisions.inspect(model, stored_in, device.name)
    loss, predictions = read(model, samples, size, device)
    how = f"{parameters.method}, {parameters.numbers}"
    details = {"quantization": how, "architecture": type(model).__name__, **dataset.details}
    if ranges:
        by = parameters.calibration_method
        details["static_activations"] = f"{static} layers multiply in int8, ranges by {by}"
    if parameters.bias_correction:
        details["bias_correction"] = f"{corrected} layers with a bias, {added} of them new"
    if parameters.save_model and not request.probe:
        context.enter_phase("finish")
        origin = {**origin_by(request), "quantization": how, "precision": stored_in}
        origin |= {RANGES_NOTE: ranges} if ranges else {}
        forget_ranges(model)
        name = parameters.save_model
        details["saved_model"] = str(save_trained(model, source, name, origin, written=written))
    same = (predictions == predictions_before).float().mean()
    sample = whole_sample(
        wall_s=wall_s,
        cpu_s=cpu_s,
        items=len(texts),
        input_tokens=sum(map(len, texts)),
    )
    return Result(
        samples=(sample,),
        stop_reason="max_repeats",
        load_s=load_s,
        weight_bytes=after.weight_bytes,
        parameter_count=after.parameter_count,
        random_weights=source.random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=f"{how}; the rest in {request.precision}",
        metrics={
            "quantize_s": wall_s,
            "model_bytes_before": float(before.weight_bytes),
            "model_bytes_after": float(after.weight_bytes),
            "held_out_loss_before": loss_before,
            "held_out_loss": loss,
            "token_agreement": float(torch.as_tensor(same)),
            "corrected_layers": float(corrected),
            "scaled_layers": float(scaled),
            **errors,
        },
        details=details,
    )


def calibration_texts(
    examples: Sequence[Example], tokenizer: Any, count: int, length: int
) -> list[list[int]]:
    """Cut the joined examples into ``count`` texts of ``length`` ids; BadConfiguration if short."""
    ids: list[int] = []
    for example in examples:
        ids += tokenizer(text_of(example), add_special_tokens=False)["input_ids"]
        if len(ids) >= count * length:
            return [ids[start : start + length] for start in range(0, count * length, length)]
    raise BadConfiguration(
        f"{count} calibration texts of {length} tokens are {count * length:,} tokens, and the "
        f"dataset has {len(ids):,}; write fewer samples, or a smaller length"
    )


def read(
    model: Any, samples: Sequence[TrainingSample], batch: int, device: Device
) -> tuple[float, torch.Tensor]:
    """Mean loss and likeliest token at the learned positions of samples."""
    import torch

    total, likeliest = 0.0, []
    with torch.no_grad():
        for start in range(0, len(samples), batch):
            inputs = padded(samples[start : start + batch], 0)
            given = {n: t.to(device.torch_device) for n, t in inputs.arguments().items()}
            logits = model(**given, use_cache=False).logits[:, :-1].float()
            labels = inputs.labels[:, 1:].to(logits.device)
            here = labels != NOT_LEARNED
            loss = torch.nn.functional.cross_entropy(logits[here], labels[here], reduction="sum")
            total += float(loss)
            likeliest.append(logits[here].argmax(-1).cpu())
    predictions = torch.cat(likeliest)
    return total / max(len(predictions), 1), predictions


#: Weights per scale: int4's default, and NF4's.
INT4_GROUP, NF4_BLOCK = 32, 64
#: Auto-round's own default.
AUTO_ROUND_ITERS = 200


def learn_rounding(
    plain: Any,
    tokenizer: Any,
    parameters: QuantizationParameters,
    texts: Sequence[Sequence[int]],
    ending: contextlib.ExitStack,
) -> Path:
    """Run AutoRound and return the directory that it wrote; Unsupported without the package."""
    try:
        from auto_round import AutoRound
    except ImportError as error:
        raise Unsupported(
            "method auto-round needs the package auto-round, for Python 3.11 and newer: "
            f"pip install auto-round ({error})"
        ) from error
    directory = ending.enter_context(tempfile.TemporaryDirectory(dir=cache_root()))
    learner = AutoRound(
        plain,
        tokenizer,
        scheme="W4A16",
        group_size=parameters.group_size or INT4_GROUP,
        iters=AUTO_ROUND_ITERS if parameters.iters is None else parameters.iters,
        nsamples=parameters.samples,
        seqlen=parameters.length,
        # Twice, since re-encoded texts may get shorter and AutoRound skips short ones.
        dataset=[tokenizer.decode([*ids, *ids]) for ids in texts],
        device_map=str(plain.device),
        enable_torch_compile=False,
    )
    _, folders = learner.quantize_and_save(f"{directory}/model", format="auto_round")
    return Path(folders[0] if isinstance(folders, (list, tuple)) else folders)


def library_config(parameters: QuantizationParameters, dtype: torch.dtype) -> Any:
    """Quantization configuration for transformers; Unsupported if a package is missing."""
    import torch
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if parameters.numbers == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    try:
        from torchao.quantization import (
            Float8WeightOnlyConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            PerGroup,
        )
    except ImportError as error:
        raise Unsupported(f"quantization needs torchao: {error}") from error
    if parameters.numbers == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    if parameters.numbers == "fp8":
        return TorchAoConfig(Float8WeightOnlyConfig())
    return TorchAoConfig(
        IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            granularity=PerGroup(parameters.group_size or INT4_GROUP),
        )
    )
