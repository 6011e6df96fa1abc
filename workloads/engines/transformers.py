"""transformers' own classes, and Nightgrid's own loop for training them."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.engines.base import Ability, EngineSpec, Modes, Package
from workloads.engines.gaudi.settings import GaudiSettings
from workloads.refusal import Asked, Refusal
from workloads.settings import Settings, setting


class CompileSettings(Settings):
    """Settings of torch's compiler."""

    torch_compile: bool = setting(
        False,
        role="choice",
        loads=True,
        description="Compile the model (torch.compile, Inductor), with a static cache and, with "
        "transformers, prompts padded to multiples of 128: graphs for each shape, which warm-up "
        "meets before timing. On Gaudi hpu_mode says so; graph compiles always on CUDA cards.",
    )


class GenerationSettings(GaudiSettings, CompileSettings):
    """Settings of a model's layout and of a card's execution."""

    packed_weights: bool = setting(
        False,
        role="choice",
        loads=True,
        loads_with="batching",  # continuous batches have machine code, others oneDNN
        description="Keep the matrices of linear layers in oneDNN's own layout (CPU only; fp32, "
        "bf16, fp16 and int8): the same arithmetic with less time for reading them. In int8 "
        "activations are brought to int8 as well, with a scale for each row, and products are "
        "int8's instead of bf16's. Where a node has AVX-512 and a C++ compiler, decoder layers of "
        "known parts run as machine code of ours in continuous batches; a row says so.",
    )
    sparse_kernels: bool = setting(
        False,
        role="choice",
        loads=True,
        description="Multiply by the card's kernels for 2:4 sparsity (CUDA, bf16 and fp16), with a "
        "model whose weights are such (`sparsity: 2:4`): half of the arithmetic and 9/16 of the "
        "bytes.",
    )


#: Precisions whose matrices lie in memory as torch's linear layers have them.
PACKABLE = ("fp32", "bf16", "fp16")
#: Settings of a layout of the matrices: the capability and the precisions that each needs, what is
#: said of a card without the one, what of the others, and a hint.
_LAYOUTS = (
    (
        "packed_weights",
        "packed_linear",
        (*PACKABLE, "int8"),
        "oneDNN's layout is one of CPUs, not of {device}",
        "packed are matrices in",
        "",
    ),
    (
        "sparse_kernels",
        "sparse_2_4",
        ("bf16", "fp16"),
        "{device} has no kernels for 2:4 sparsity: zeros cost as much as numbers",
        "the kernels for 2:4 take",
        "leave sparse_kernels out",
    ),
)


def _refuse_generation(asked: Asked) -> Iterator[Refusal]:
    """Packed weights are in a CPU's layout, and nothing else may use the matrices; what torch
    compiles for a card are plain models."""
    yield from _refuse_layouts(asked)
    modes, by_mode = not asked.on.can("dynamic_shapes"), asked.parameters.get("hpu_mode")
    name = "torch_compile" if asked.parameters.get("torch_compile") else "hpu_mode"
    if name == "hpu_mode" and not (modes and by_mode == "compile"):
        return
    hint = "write hpu_mode: eager" if name == "hpu_mode" else "leave torch_compile out"
    if name == "torch_compile" and modes:
        reason = f"on {asked.on.title} the mode of execution says whether a model is compiled"
        hint = "write torch_compile: false and hpu_mode: compile"
    elif asked.precision not in PACKABLE:
        reason = f"the kernels of {asked.precision} run in eager mode"
    elif (asked.parameters.get("tensor_parallel") or 1) > 1:
        reason = "this version compiles no model that is split over cards"
    elif _has_own_generator(asked.model):
        reason = "this version compiles models that are one decoder"
    elif name == "torch_compile" and asked.parameters.get("batching") == "continuous":
        reason = "batching continuous changes shapes at every step"
    elif name == "torch_compile" and any(asked.parameters.get(each[0]) for each in _LAYOUTS):
        reason = "this version compiles plain matrices only"
    else:
        return
    yield Refusal(setting=name, reason=reason, hint=hint, unsupported=True)


def _has_own_generator(model: str) -> bool:
    """Tell if the task of a model generates in a way of its own."""
    from workloads.models.catalog import checkpoint_kind
    from workloads.tasks import task_of

    kind = checkpoint_kind(model)
    task = task_of(kind) if kind is not None else None
    return task is not None and "generator" in task.functions


def _refuse_layouts(asked: Asked) -> Iterator[Refusal]:
    """Refuse layouts of the matrices that the card cannot compute with, or other parts not read."""
    for name, capability, precisions, lacking, taken, hint in _LAYOUTS:
        if not asked.parameters.get(name):
            continue
        if not asked.on.can(capability):
            reason = lacking.format(device=asked.device)
        elif asked.precision not in precisions:
            reason = f"{taken} {', '.join(precisions)}, not {asked.precision}"
        elif asked.parameters.get("adapter") or (asked.parameters.get("tensor_parallel") or 1) > 1:
            reason = "adapters and tensor parallelism need the plain matrices"
        else:
            continue
        yield Refusal(setting=name, reason=reason, hint=hint, unsupported=True)


SPEC = EngineSpec(
    name="transformers",
    also_called=("hf", "huggingface", "torch", "pytorch"),
    summary="transformers' own generate, and Nightgrid's own training loop.",
    default=True,
    needs="native_eager",
    abilities={
        "generate": Ability(
            function="workloads.generation.static_shapes:load",
            tasks=("causal-lm", "seq2seq-lm"),
            refuse=_refuse_generation,
            settings=GenerationSettings,
            adapters=True,
            attentions=None,
        ),
        "encode": Ability(
            function="workloads.encoding.transformers_encoder:load", tasks=("masked-lm",)
        ),
        "train": Ability(function="workloads.training.loop:run", attentions=None),
        "quantize": Ability(function="workloads.quantization:run", tasks=("causal-lm",)),
    },
    install="pip install transformers",
    packages=(Package(name="transformers", module="transformers"),),
    own_process=False,
    opens_protected=True,
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
