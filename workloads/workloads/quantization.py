"""Quantization: a step that stores a model in fewer bits, for other jobs to run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from workloads.base import SAMPLES, JobDescription, Metric, Refusal, WorkloadError
from workloads.data.rules import DatasetParameters
from workloads.finetuning_method import SAVE_MODEL
from workloads.models.known_config import known_config
from workloads.models.model_rules import is_protected, saving_refusals
from workloads.models.random_weights import PREFIX
from workloads.models.targets import linear_shapes
from workloads.quantizers import INT4_GROUP, NF4_BLOCK
from workloads.registry import WorkloadSpec
from workloads.settings import setting

#: What the libraries of other methods lack here.
_LACKING = {
    "gptq": "gptqmodel comes without wheels and needs a compiler",
    "awq": "AutoAWQ is not maintained any more and does not import beside this transformers",
}


#: Numbers of the methods that know one kind.
_STORES = {"static": "int8", "auto-round": "int4", "gptq": "int4", "awq": "int4"}


class QuantizationParameters(DatasetParameters):
    """One model in fewer bits, and what that costs in quality."""

    method: Literal["weight-only", "static", "auto-round", "gptq", "awq"] = setting(
        "weight-only",
        role="work",
        description="weight-only rounds every weight to the nearest number; static (int8) rounds "
        "activations too, in ranges that the calibration texts have, and multiplies in int8; "
        "auto-round learns how to round from those texts (package auto-round).",
    )
    numbers: Literal["int8", "fp8", "int4", "nf4"] = setting(
        "int8",
        role="work",
        description="Numbers that linear layers are stored in: int8 and fp8 (e4m3) with a scale a "
        "channel, int4 with one a group (torchao); nf4, the quantiles of a normal distribution, "
        "with one for every 64 weights (bitsandbytes). Jobs with the model write precision: int8, "
        "fp8 or int4.",
    )
    group_size: int | None = setting(
        None, role="work", ge=8, description="Weights that share one scale, for int4. Left out: 32."
    )
    iters: int | None = setting(
        None,
        role="work",
        ge=0,
        description="Steps in which auto-round learns to round each block; 0 rounds at once. Left "
        "out: 200.",
    )
    bias_correction: bool = setting(
        False,
        role="work",
        description="Add to each layer's bias what its mean output lost on the calibration texts; "
        "layers without a bias stay as they are.",
    )
    samples: int = setting(
        32,
        role="work",
        length=True,
        ge=1,
        description="Calibration texts, of the first examples of the dataset, one after the other.",
    )
    length: int = setting(
        256, role="work", length=True, ge=8, description="Tokens of each calibration text."
    )
    held_out: int = setting(
        16,
        role="work",
        ge=1,
        le=10_000,
        description="Examples, the last of the dataset, on which the model is compared before and "
        "after: loss, and share of equal predictions.",
    )
    save_model: str | None = SAVE_MODEL

    @property
    def reads_texts(self) -> bool:
        """Tell if the calibration texts have a part in it."""
        return self.method in ("static", "auto-round") or self.bias_correction


def refuse(asked: JobDescription) -> tuple[Refusal, ...]:
    """All that speaks against a job, beside its engine and its model."""
    found = QuantizationParameters.model_validate(dict(asked.parameters))
    return (
        *_method(asked, found),
        *_auto_round(asked, found),
        *_model(asked, found),
        *_texts(asked, found),
    )


def _method(asked: JobDescription, found: QuantizationParameters) -> Iterator[Refusal]:
    if found.method in _LACKING:
        yield Refusal(
            setting="method",
            reason=_LACKING[found.method],
            hint="write method: auto-round, whose checkpoints are packed alike",
            unsupported=True,
        )
    stores = _STORES.get(found.method, found.numbers)
    if found.numbers != stores:
        yield Refusal(
            setting="numbers",
            reason=f"{found.method} stores {stores}, not {found.numbers}",
            hint=f"write numbers: {stores}",
        )
    if found.method != "auto-round" and found.iters is not None:
        yield Refusal(
            setting="iters",
            reason=f"{found.method} learns nothing",
            hint="leave it out, or write method: auto-round",
        )
    if found.group_size is not None and found.numbers != "int4":
        yield Refusal(
            setting="group_size",
            reason=f"{found.numbers} has no groups to choose",
            hint="leave it out, or write numbers: int4",
        )
    if asked.cards > 1:
        yield Refusal(setting="cards", reason="one card quantises a model", hint="write cards: 1")
    if isinstance(asked.batch_size, str):
        yield Refusal(
            setting="batch_size",
            reason="nothing is searched here: it is the held-out texts at once",
            hint="write a number",
        )
    if not asked.on.can("dynamic_shapes"):
        yield Refusal(
            setting="numbers",
            reason=f"torchao and bitsandbytes have no kernels for {asked.on.title}",
            hint="quantise on a CPU or a CUDA card",
            unsupported=True,
        )


def _auto_round(asked: JobDescription, found: QuantizationParameters) -> Iterator[Refusal]:
    """Its library writes the model to a directory, which is read back and kept as it is."""
    if found.method != "auto-round":
        return
    if found.bias_correction:
        yield Refusal(
            setting="bias_correction",
            reason="auto-round writes the model itself, and corrected biases would not be in it",
            hint="leave it out, or write method: weight-only",
        )
    if asked.model.startswith(PREFIX):
        yield Refusal(
            setting="model",
            reason=f"{asked.model} has no weights to read back from files, as auto-round does",
            hint="name a checkpoint, or write method: weight-only",
        )
    if is_protected(asked.model):
        yield Refusal(
            setting="model",
            reason=f"{asked.model} is protected, and auto-round writes weights in the clear",
            hint="name the model as it was before `nightgrid protect`, or write method: "
            "weight-only",
        )


def _model(asked: JobDescription, found: QuantizationParameters) -> Iterator[Refusal]:
    yield from saving_refusals(asked.model, found.save_model)
    if asked.precision not in ("fp32", "bf16", "fp16"):
        yield Refusal(
            setting="precision",
            reason=f"{asked.precision} is quantised; here it is the format of what is not",
            hint="write precision: bf16 and numbers",
        )
    if (known_config(asked.model) or {}).get("quantization_config"):
        yield Refusal(
            setting="model",
            reason=f"{asked.model} is quantised already",
            hint="name the model that it was made from",
        )
    if found.numbers not in ("int4", "nf4"):
        return
    group = NF4_BLOCK if found.numbers == "nf4" else found.group_size or INT4_GROUP
    for name, (_, inputs) in (linear_shapes(asked.model) or {}).items():
        if inputs % group:
            yield Refusal(
                setting="group_size" if found.numbers == "int4" else "numbers",
                reason=f"groups of {group} do not divide the {inputs} inputs of {name}",
                hint="choose a group_size that divides them, or numbers: int8",
            )
            return


def _texts(asked: JobDescription, found: QuantizationParameters) -> Iterator[Refusal]:
    """Fewer texts than are wanted; a token is at least one byte."""
    from workloads.data.catalog import find_dataset, load_examples
    from workloads.data.examples import text_of

    wanted = found.samples * found.length
    try:
        entry = find_dataset(asked.dataset)
        if entry.kind == "hub":
            return
        examples = load_examples(asked.dataset, found.reading())
    except (WorkloadError, OSError):
        return  # whoever reads it says so
    if found.held_out >= len(examples):
        yield Refusal(
            setting="held_out",
            reason=f"{asked.dataset} has {len(examples):,} examples, and none would be left to "
            "calibrate with",
            hint=f"write less than {len(examples):,}",
        )
        return
    if not found.reads_texts:
        return
    there = 0
    for example in examples[: len(examples) - found.held_out]:
        there += len(text_of(example).encode()) + 1
        if there >= wanted:
            return
    yield Refusal(
        setting="samples",
        reason=f"{found.samples} texts of {found.length} tokens are {wanted:,} tokens, and what "
        f"{asked.dataset} has beside the held-out examples is {there:,} bytes",
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
    ),
    refuse=refuse,
)
