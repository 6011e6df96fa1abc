"""transformers' own ``generate``, as it is or with a static cache and compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import ClassVar

from workloads.base import JobDescription, Refusal, Request, require_package
from workloads.devices import device_spec
from workloads.engines.base import (
    DTYPES,
    Ability,
    CompileSettings,
    EngineSpec,
    GaudiSettings,
    Modes,
    Package,
    ServerCommand,
    ServerPlace,
    ServerSettings,
    is_encoder_decoder,
    python_command,
)
from workloads.settings import Declaration, load_choice


class GenerationSettings(GaudiSettings, CompileSettings):
    """Settings of a model's layout and of a card's execution."""

    removed: ClassVar[Mapping[str, Declaration]] = {
        "packed_weights": Declaration(
            role="choice",
            default=False,
            loads=True,
            description="Matrices of linear layers in a layout for CPUs, with kernels of our own.",
            instead="write engine: openvino, which packs weights for a processor, or leave it out",
        )
    }

    sparse_kernels: bool = load_choice(
        False,
        description="Multiply by the card's kernels for 2:4 sparsity (CUDA, bf16 and fp16), with a "
        "model whose weights are such (`sparsity: 2:4`): half of the arithmetic and 9/16 of the "
        "bytes.",
    )
    dictionary_products: bool = load_choice(
        False,
        description="Multiply a model made with `dictionary_atoms` by its dictionary: inputs by "
        "every atom once, then sums by the code, instead of by the whole matrices.",
    )


_SPARSE = ("bf16", "fp16")  # precisions of the 2:4 kernels


def _refuse_generation(job: JobDescription) -> Iterator[Refusal]:
    yield from _refuse_products(job)
    device = device_spec(job.device)
    modes = not device.can("dynamic_shapes")
    name = "torch_compile" if job.parameters.get("torch_compile") else "hpu_mode"
    if name == "hpu_mode" and not (modes and job.parameters.get("hpu_mode") == "compile"):
        return
    hint = "write hpu_mode: eager" if name == "hpu_mode" else "leave torch_compile out"
    if name == "torch_compile" and modes:
        reason = f"on {device.title} the mode of execution says whether a model is compiled"
        hint = "write torch_compile: false and hpu_mode: compile"
    elif job.precision not in DTYPES:
        reason = f"the kernels of {job.precision} run in eager mode"
    elif (job.parameters.get("tensor_parallel") or 1) > 1:
        reason = "this version compiles no model that is split over cards"
    elif is_encoder_decoder(job.model):
        reason = "this version compiles models that are one decoder"
    elif name == "torch_compile" and {"sparse_kernels", "dictionary_products"} & {
        setting for setting, value in job.parameters.items() if value
    }:
        reason = "this version compiles plain matrices only"
    else:
        return
    yield Refusal(setting=name, reason=reason, hint=hint, unsupported=True)


def _refuse_products(job: JobDescription) -> Iterator[Refusal]:
    given = [n for n in ("sparse_kernels", "dictionary_products") if job.parameters.get(n)]
    if not given:
        return
    name, device = given[-1], device_spec(job.device)
    if len(given) > 1:
        reason = "a model has weights for one of sparse_kernels and dictionary_products"
    elif name == "sparse_kernels" and not device.can("sparse_2_4"):
        reason = (
            f"{job.device} has no kernels for 2:4 sparsity: zeros cost as much as other numbers"
        )
    elif name == "sparse_kernels" and job.precision not in _SPARSE:
        reason = f"the kernels for 2:4 take {', '.join(_SPARSE)}, not {job.precision}"
    elif job.precision not in DTYPES:
        reason = f"sums of atoms are in {', '.join(DTYPES)}, not {job.precision}"
    elif name == "dictionary_products" and not device.can("dynamic_shapes"):
        reason = f"on {device.title} nobody has tried sums of atoms"
    elif job.parameters.get("adapter") or (job.parameters.get("tensor_parallel") or 1) > 1:
        reason = "adapters and tensor parallelism need the plain matrices"
    else:
        return
    yield Refusal(setting=name, reason=reason, hint=f"leave {name} out", unsupported=True)


class ServedSettings(ServerSettings):
    """Settings of ``transformers serve``."""

    server_batching: bool = load_choice(
        False,
        description="Continuous batching of `transformers serve` (--continuous-batching), with "
        "paged attention; without, requests are answered one after another. On a CPU release "
        "5.23 emitted no token with it.",
    )


def _refuse_served(job: JobDescription) -> Iterator[Refusal]:
    if job.precision not in DTYPES:
        reason = f"`transformers serve` loads plain weights, not {job.precision}"
        hint = f"write {', '.join(DTYPES)}"
        yield Refusal(setting="precision", reason=reason, hint=hint, unsupported=True)
    for name in ("max_sequences", "max_model_len"):
        if job.parameters.get(name) is not None:
            reason = "`transformers serve` has no such limit"
            yield Refusal(setting=name, reason=reason, hint=f"leave {name} out", unsupported=True)


def serve(request: Request, place: ServerPlace) -> ServerCommand:
    """The command of ``transformers serve``, which knows no keys; see ``engines.base``."""
    from workloads.models.loading import open_model

    for package in ("openai", "fastapi", "uvicorn"):
        require_package(package, "`transformers serve`", "'transformers[serving]'")
    path = open_model(request.model).path
    arguments = {
        "host": place.host,
        "port": place.port,
        "device": device_spec(place.device).torch_type or place.device,
        "dtype": DTYPES[request.precision],
        "attn-implementation": "sdpa",
        "log-level": "error",
    }
    batching = "" if request.settings.get("server_batching") else "no-"
    return ServerCommand(
        arguments=python_command(
            *("transformers.cli.transformers", "serve", path),
            options=arguments,
            switches=[f"{batching}continuous-batching"],
        ),
        environment={"OMP_NUM_THREADS": str(place.threads)},
        model=path,
        token_ids=False,
        past_end={"generation_config": json.dumps({"eos_token_id": -1})},  # no token's id
    )


SPEC = EngineSpec(
    name="transformers",
    also_called=("hf", "huggingface", "torch", "pytorch"),
    summary="transformers' own generate, and Nightgrid's own training loop.",
    default=True,
    needs="native_eager",
    abilities={
        "generate": Ability(
            function="workloads.engines.transformers.generation:load_compiled",
            tasks=("causal-lm", "seq2seq-lm"),
            refuse=_refuse_generation,
            settings=GenerationSettings,
            adapters=True,
            attentions=None,
        ),
        "encode": Ability(
            function="workloads.engines.transformers.generation:load_encoder",
            tasks=("masked-lm",),
            attentions=None,
        ),
        "serve": Ability(
            function="workloads.engines.transformers:serve",
            tasks=("causal-lm",),
            refuse=_refuse_served,
            settings=ServedSettings,
            random_weights=False,
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
    features=frozenset({"tensor_parallel"}),
)
