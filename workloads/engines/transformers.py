"""transformers' own classes, and Nightgrid's own loop for training them."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.engines.base import Ability, EngineSpec, Modes, Package
from workloads.engines.gaudi.settings import GaudiSettings
from workloads.refusal import Asked, Refusal
from workloads.settings import setting


class GenerationSettings(GaudiSettings):
    """Settings of a model's layout and of a card's execution."""

    packed_weights: bool = setting(
        False,
        role="choice",
        loads=True,
        description="Keep the matrices of linear layers in oneDNN's own layout (CPU only, fp32, "
        "bf16 and fp16): the same arithmetic with less time for reading them.",
    )


#: Precisions whose matrices lie in memory as torch's linear layers have them.
PACKABLE = ("fp32", "bf16", "fp16")


def _refuse_generation(asked: Asked) -> Iterator[Refusal]:
    """Packed weights are in a CPU's layout, and nothing else may use the matrices; what torch
    compiles for a card are plain models."""
    if asked.parameters.get("packed_weights"):
        yield from _refuse_packing(asked)
    if asked.parameters.get("hpu_mode") != "compile" or asked.on.can("dynamic_shapes"):
        return
    if asked.precision not in PACKABLE:
        reason = f"the kernels of {asked.precision} run in eager mode"
    elif (asked.parameters.get("tensor_parallel") or 1) > 1:
        reason = "this version compiles no model that is split over cards"
    elif _has_own_generator(asked.model):
        reason = "this version compiles models that are one decoder"
    else:
        return
    yield Refusal(setting="hpu_mode", reason=reason, hint="write hpu_mode: eager", unsupported=True)


def _has_own_generator(model: str) -> bool:
    """Tell if the task of a model generates in a way of its own."""
    from workloads.models.catalog import checkpoint_kind
    from workloads.tasks import task_of

    kind = checkpoint_kind(model)
    task = task_of(kind) if kind is not None else None
    return task is not None and "generator" in task.functions


def _refuse_packing(asked: Asked) -> Iterator[Refusal]:
    if not asked.on.can("packed_linear"):
        reason = f"oneDNN's layout is one of CPUs, not of {asked.device}"
    elif asked.precision not in PACKABLE:
        reason = f"packed are matrices in {', '.join(PACKABLE)}, not {asked.precision}"
    elif asked.parameters.get("adapter") or (asked.parameters.get("tensor_parallel") or 1) > 1:
        reason = "adapters and tensor parallelism need the plain matrices"
    else:
        return
    yield Refusal(setting="packed_weights", reason=reason, unsupported=True)


SPEC = EngineSpec(
    name="transformers",
    summary="transformers' own generate, and Nightgrid's own training loop.",
    default=True,
    needs="native_eager",
    abilities={
        "generate": Ability(
            function="workloads.generation.static_shapes:load",
            tasks=("causal-lm", "seq2seq-lm"),
            refuse=_refuse_generation,
            settings=GenerationSettings,
        ),
        "encode": Ability(
            function="workloads.encoding.transformers_encoder:load", tasks=("masked-lm",)
        ),
        "train": Ability(function="workloads.training.loop:run"),
    },
    install="pip install transformers",
    packages=(Package(name="transformers", module="transformers"),),
    own_process=False,
    modes={
        "hpu": Modes(
            setting="hpu_mode",
            names=("eager", "compile"),
            lacking={"lazy": "does not cut graphs, which lazy mode collects"},
            chosen_for={"generate": "compile"},
        )
    },
    features=frozenset({"tensor_parallel", "continuous_batching"}),
)
