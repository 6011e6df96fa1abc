"""The parameters of fine-tuning that are not a technique's: its method, data and length.

Torch-free, since the plan reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from workloads.data.rules import DatasetParameters
from workloads.profiling import PROFILE
from workloads.settings import setting

Method = Literal["full", "lora", "vera", "dora", "qlora", "qat", "qat-lora", "distill"]

#: Methods that train a small adapter over a frozen model.
ADAPTER_METHODS = ("lora", "vera", "dora", "qlora", "qat-lora")

#: Methods that train the model's own weights.
WHOLE_METHODS = ("full", "qat", "distill")

#: VeRA's two shared random matrices want a large rank; its trained vectors a large rate.
DEFAULT_RANK = {"vera": 256}
DEFAULT_LEARNING_RATE = {"full": 5e-5, "qat": 5e-5, "distill": 5e-5, "vera": 1e-2}

#: Adapters are directories; names must do on every file system.
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


#: The setting of every workload that makes a model.
SAVE_MODEL = setting(
    None,
    role="neutral",
    produces="model",
    pattern=ADAPTER_NAME,
    description="Name to keep the model under that comes out; jobs with `model: NAME` wait for it.",
)


class TrainingParameters(DatasetParameters):
    """Settings of all training: at which rate, on how much data, for how long."""

    learning_rate: float | None = setting(
        None,
        role="work",
        always_in_id=True,
        gt=0,
        le=10,
        description="Learning rate of the first step, and of all unless a schedule lowers it. Left "
        "out: 2e-4 for adapters, 5e-5 for full, qat and distill, 1e-2 for vera.",
    )
    steps: int = setting(
        20,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        description="Optimizer steps that are timed; measure.warmup of them come first, which "
        "train as well. Only measure.time_limit_s ends training earlier.",
    )
    profile: bool = PROFILE
    samples: int = setting(
        1000,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        description="Training samples: the first of the dataset, from its start again where it is "
        "shorter. Gone through again when the steps need more.",
    )
    max_length: int = setting(
        512,
        role="work",
        length=True,
        always_in_id=True,
        ge=8,
        description="Most tokens of a sample, prompt and answer together. A longer answer is cut "
        "at its end, down to half of this; then the prompt is.",
    )


class MethodParameters(TrainingParameters):
    """Settings of fine-tuning: what is trained, and what becomes of it."""

    method: Method = setting(
        "lora",
        role="work",
        loads=True,
        always_in_id=True,
        description="full trains all weights; lora, dora and vera an adapter; qlora an adapter "
        "over a 4-bit (NF4) base; qat all weights under fake quantization to int4 weights and int8 "
        "activations; qat-lora an adapter over such a base; distill all weights of a student, "
        "from a teacher's distribution.",
    )
    rank: int | None = setting(
        None,
        role="work",
        always_in_id=True,
        ge=1,
        le=4096,
        description="Rank of the adapter's matrices. Left out: 8, for vera 256.",
    )
    alpha: int | None = setting(
        None,
        role="work",
        always_in_id=True,
        ge=1,
        description="The adapter's product is scaled by alpha / rank. Left out: twice the rank.",
    )
    targets: str | None = setting(
        None,
        role="work",
        always_in_id=True,
        min_length=1,
        description="Linear layers that get an adapter: names separated by commas, or all-linear. "
        "Left out: the attention's inputs (query, key, value).",
    )
    held_out: int = setting(
        0,
        role="work",
        ge=0,
        le=100_000,
        description="Examples that are not trained on, the last of the dataset. After the last "
        "step the loss on their answers is measured (held_out_loss), the same way for every "
        "technique.",
    )
    save_adapter: str | None = setting(
        None,
        role="neutral",
        produces="adapter",
        always_in_id=True,
        pattern=ADAPTER_NAME,
        description="Name to keep the trained adapter under, for `adapter:` of text-generation.",
    )
    save_model: str | None = SAVE_MODEL


#: Steps of a job that is asked only whether its batch fits: the first allocates the optimizer's
#: averages, the second meets them in its passes.
PROBE_STEPS = 2


#: The method of workloads that have no choice of one.
WHOLE_MODEL = "full"


def method_name(parameters: Mapping[str, Any]) -> str:
    """The method of a job by name; a workload without methods trains all weights."""
    return str(parameters.get("method", WHOLE_MODEL))


def method_of(parameters: Mapping[str, Any]) -> MethodParameters:
    """The method's part of all parameters."""
    there = {name: parameters[name] for name in MethodParameters.model_fields if name in parameters}
    return MethodParameters.model_validate({"method": WHOLE_MODEL, **there})


def method_for(parameters: Mapping[str, Any], *, probe: bool) -> MethodParameters:
    """The method's part as a job runs it; a probe takes few steps and keeps nothing."""
    method = method_of(parameters)
    if not probe:
        return method
    return method.model_copy(
        update={"steps": PROBE_STEPS, "save_adapter": None, "save_model": None}
    )
