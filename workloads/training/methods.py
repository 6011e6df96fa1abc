"""Fine-tuning methods. Imports torch in functions only, since plans read the settings.

*Full* fine-tuning changes every weight. *LoRA* freezes them and adds a learned product of two thin
matrices to each target layer; *DoRA* learns magnitude and direction of weight columns apart; *VeRA*
shares two random matrices among all layers and learns vectors. *QLoRA* has a frozen 4-bit (NF4)
base. *QAT* rounds weights to int4 and activations to int8 in the forward pass (over a LoRA only the
base weight); ``converted`` makes real int4 weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.base import BadConfiguration, Metric, Unsupported
from workloads.bench.profiling import PROFILE
from workloads.data.datasets import DatasetParameters
from workloads.models import precision as weights
from workloads.models import rules
from workloads.settings import Declaration, amount_in_id, neutral, neutral_in_id, work, work_in_id

if TYPE_CHECKING:
    import torch

Method = Literal["full", "lora", "vera", "dora", "qlora", "qat", "qat-lora", "distill"]

#: Methods that train a small adapter over a frozen model.
ADAPTER_METHODS = ("lora", "vera", "dora", "qlora", "qat-lora")

#: Methods that train the model's own weights.
WHOLE_METHODS = ("full", "qat", "distill")

#: VeRA's shared random matrices need a large rank, its trained vectors a large rate.
DEFAULT_RANK = {"vera": 256}
DEFAULT_LEARNING_RATE = {"full": 5e-5, "qat": 5e-5, "distill": 5e-5, "vera": 1e-2}

#: Directory names that are valid on every file system.
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


#: The setting of every workload that makes a model.
SAVE_MODEL = neutral(
    None,
    produces="model",
    pattern=ADAPTER_NAME,
    description="Name to keep the model under that comes out; jobs with `model: NAME` wait for it.",
)


class TrainingParameters(DatasetParameters):
    """Settings of all training: at which rate, on how much data, for how long."""

    removed: ClassVar[Mapping[str, Declaration]] = {
        "copy_ahead": Declaration(
            role="choice",
            default=False,
            description="Copy the next batch on a stream of its own while the card computes.",
            instead="write non_blocking_copies: true, or leave it out",
        )
    }

    learning_rate: float | None = work_in_id(
        None,
        gt=0,
        le=10,
        description="Learning rate of the first step, and of all unless a schedule lowers it. Left "
        "out: 2e-4 for adapters, 5e-5 for full, qat and distill, 1e-2 for vera.",
    )
    steps: int = amount_in_id(
        20,
        description="Optimizer steps that are timed; measure.warmup of them come first, which "
        "train as well. Only measure.time_limit_s ends training earlier.",
    )
    profile: bool = PROFILE
    samples: int = amount_in_id(
        1000,
        description="Training samples: the first of the dataset, from its start again where it is "
        "shorter. Gone through again when the steps need more.",
    )
    max_length: int = amount_in_id(
        512,
        ge=8,
        description="Most tokens of a sample, prompt and answer together. A longer answer is cut "
        "at its end, down to half of this; then the prompt is.",
    )


class MethodParameters(TrainingParameters):
    """Settings of fine-tuning: what is trained, and what becomes of it."""

    removed: ClassVar[Mapping[str, Declaration]] = {
        "adapter_products": Declaration(
            role="choice",
            default="each",
            description="Adapters of layers that read the same input, computed together.",
            instead="leave it out: each layer computes its adapter",
        )
    }

    method: Method = work_in_id(
        "lora",
        loads=True,
        description="full trains all weights; lora, dora and vera an adapter; qlora an adapter "
        "over a 4-bit (NF4) base; qat all weights under fake quantization to int4 weights and int8 "
        "activations; qat-lora an adapter over such a base; distill all weights of a student, "
        "from a teacher's distribution.",
    )
    rank: int | None = work_in_id(
        None,
        ge=1,
        le=4096,
        description="Rank of the adapter's matrices. Left out: 8, for vera 256.",
    )
    alpha: int | None = work_in_id(
        None,
        ge=1,
        description="The adapter's product is scaled by alpha / rank. Left out: twice the rank.",
    )
    targets: str | None = work_in_id(
        None,
        min_length=1,
        description="Linear layers that get an adapter: names separated by commas, or all-linear. "
        "Left out: the attention's inputs (query, key, value).",
    )
    held_out: int = work(
        0,
        ge=0,
        le=100_000,
        description="Examples that are not trained on, the last of the dataset. After the last "
        "step the loss on their answers is measured (held_out_loss), the same way for every "
        "technique.",
    )
    save_adapter: str | None = neutral_in_id(
        None,
        produces="adapter",
        pattern=ADAPTER_NAME,
        description="Name to keep the trained adapter under, for `adapter:` of text-generation.",
    )
    save_model: str | None = SAVE_MODEL


#: Steps of a probe: the first allocates optimizer state, the second runs with it.
PROBE_STEPS = 2


#: Method of workloads without a choice of methods.
WHOLE_MODEL = "full"


def method_name(parameters: Mapping[str, Any]) -> str:
    """The method of a job by name; a workload without methods trains all weights."""
    return str(parameters.get("method", WHOLE_MODEL))


def method_of(parameters: Mapping[str, Any], *, probe: bool = False) -> MethodParameters:
    """The method's part of all parameters; a probe takes few steps and saves nothing."""
    there = {name: parameters[name] for name in MethodParameters.model_fields if name in parameters}
    if probe:
        there |= {"steps": PROBE_STEPS, "save_adapter": None, "save_model": None}
    return MethodParameters.model_validate({"method": WHOLE_MODEL, **there})


LOSSES = (
    Metric(
        name="first_batch_loss_before",
        title="loss before",
        description="Loss on the first batch before training.",
    ),
    Metric(
        name="first_batch_loss_after",
        title="loss after",
        description="Loss on the first batch after the last step.",
        better="lower",
    ),
    Metric(
        name="held_out_loss",
        title="held-out loss",
        description="Mean loss of the learned tokens of examples that are not trained on, after "
        "the last step (`held_out`).",
        better="lower",
        beside_speed=True,
    ),
)


#: Weights that share one scale in QAT's int4.
QAT_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A model ready to be trained by a method."""

    model: Any
    weights: weights.ModelWeights  # of the base, as loaded
    detail: str  # for the row: formats of the weights, and what learns
    adapter: str  # for the row: rank, alpha and targets; "" without an adapter


def learning_rate(parameters: MethodParameters) -> float:
    """The learning rate set, or the method's default."""
    return parameters.learning_rate or DEFAULT_LEARNING_RATE.get(parameters.method, 2e-4)


def rank(parameters: MethodParameters) -> int:
    """The rank set, or the method's default."""
    return parameters.rank or DEFAULT_RANK.get(parameters.method, 8)


def base_precision(method: str, precision: str) -> str:
    """Precision (of ``workloads.models.precision``) of the stored base."""
    return "int4" if method == "qlora" else precision


def loading_arguments(method: str, precision: str, device: Any) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``; Unsupported if device or packages lack the base."""
    arguments = weights.loading_arguments(base_precision(method, precision), device.name)
    if method != "qlora":
        return arguments
    # QLoRA's products, and all that is not in 4 bits, have the job's precision.
    dtype = weights.compute_dtype(precision)
    arguments["quantization_config"].bnb_4bit_compute_dtype = dtype
    keyword = next(name for name in arguments if name.endswith("dtype"))
    return arguments | {keyword: dtype, "device_map": {"": device.torch_device}}


def apply(model: Any, parameters: MethodParameters, precision: str, device: str) -> Applied:
    """Prepare a loaded base model for its method; freeze what does not learn. BadConfiguration for
    unmatched targets; Unsupported for sizes that the quantization cannot divide."""
    method = parameters.method
    from workloads.models.describe import linear_layers
    from workloads.training import saved_adapters

    base = weights.inspect(model, base_precision(method, precision), device)
    if method in ADAPTER_METHODS:
        saved_adapters.split_fused(model, parameters.targets)
    names = list(linear_layers(model))
    detail = f"{precision} weights" if method != "qlora" else f"NF4 base, {precision} products"
    if method == "qlora":
        # Not peft's prepare_model_for_kbit_training: its fp32 embeddings and output layer would
        # take more memory than LoRA.
        model.requires_grad_(False)
        for module in model.modules():
            # bitsandbytes' 4-bit layout for bf16 products on CPUs has no backward pass.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    if method.startswith("qat"):
        layers = weights.hidden_layers(model)
        for name, layer in layers.items():
            if layer.in_features % QAT_GROUP:
                raise Unsupported(
                    f"quantization-aware training rounds in groups of {QAT_GROUP}, which do not "
                    f"divide the inputs of {name}"
                )
        _qat(model, "prepare", lambda module, name: name in layers)
        if not _fake_quantized(model):
            raise BadConfiguration("torchao put fake quantization on none of the model's layers")
        detail += f", rounded to int4 in groups of {QAT_GROUP} under int8 activations"
    adapter = ""
    if method in ADAPTER_METHODS:
        chosen = rules.choose(parameters.targets, names)
        model = _with_adapter(model, parameters, chosen)
        alpha = "" if method == "vera" else f", alpha {parameters.alpha or 2 * rank(parameters)}"
        adapter = f"rank {rank(parameters)}{alpha} on {', '.join(chosen)}"
        learning = {str(p.dtype) for p in model.parameters() if p.requires_grad}
        formats = " and ".join(sorted(kind.removeprefix("torch.") for kind in learning))
        detail += f"; {method} adapter in {formats}"
    return Applied(model=model, weights=base, detail=detail, adapter=adapter)


def _with_adapter(model: Any, parameters: MethodParameters, chosen: tuple[str, ...]) -> Any:
    from peft import LoraConfig, TaskType, VeraConfig, get_peft_model

    # Conv1D, GPT-2's linear layer, stores its matrix the other way round.
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    pairs = getattr(model.config, "is_encoder_decoder", False)
    kind = TaskType.SEQ_2_SEQ_LM if pairs else TaskType.CAUSAL_LM
    settings: dict[str, Any] = {
        "r": rank(parameters),
        "target_modules": list(chosen),
        "task_type": kind,
        "fan_in_fan_out": transposed,
    }
    if parameters.method != "vera":
        settings["lora_alpha"] = parameters.alpha or 2 * rank(parameters)
        settings["use_dora"] = parameters.method == "dora"
    try:
        config = VeraConfig if parameters.method == "vera" else LoraConfig
        return get_peft_model(model, config(**settings))
    except (ValueError, NotImplementedError) as error:  # e.g. VeRA on shapes it cannot share
        raise Unsupported(f"{parameters.method} on this model: {error}") from error


def _qat(model: Any, step: str, belongs: Callable[[Any, str], bool]) -> None:
    import torch

    try:
        from torchao.quantization import (
            Int8DynamicActivationIntxWeightConfig,
            PerGroup,
            quantize_,
        )
        from torchao.quantization.qat import QATConfig
    except ImportError as error:
        raise Unsupported(f"quantization-aware training needs torchao: {error}") from error

    logging.getLogger("torchao").setLevel(logging.ERROR)
    base = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        weight_granularity=PerGroup(QAT_GROUP),
    )
    quantize_(model, QATConfig(base, step=step), belongs)


def converted(model: Any) -> tuple[Any, str]:
    """Merge and convert a QAT model to int4 in place; BadConfiguration if a layer is not int4."""
    import torch

    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    fake = _fake_quantized(model)
    before = sum(weights.stored_bytes(p) for p in model.parameters())
    _qat(model, "convert", lambda module, name: isinstance(module, torch.nn.Linear))
    left = _fake_quantized(model)
    integer = {n for n in fake if _is_int4(model.get_submodule(n).weight)}
    if left or not fake or integer != fake:
        raise BadConfiguration(
            f"after conversion {len(integer)} of {len(fake)} layers are int4 and {len(left)} "
            "still fake-quantised"
        )
    after = sum(weights.stored_bytes(p) for p in model.parameters())
    return model, f"{len(integer)} layers to int4 weights; {before} to {after} bytes as stored"


def _fake_quantized(model: Any) -> set[str]:
    return {n for n, m in model.named_modules() if "FakeQuantized" in type(m).__name__}


def _is_int4(weight: torch.Tensor) -> bool:
    """Tell if all stored integers lie in -8 … 7."""
    import torch

    integers = [
        part
        for part in weights.stored_tensors(weight)
        if not part.is_floating_point() and part.numel() > weight.shape[0]
    ]
    return bool(integers) and all(
        int(torch.amin(part)) >= -8 and int(torch.amax(part)) <= 7 for part in integers
    )
