"""Nightgrid's own decoding: one launch a step over a static cache, with packed weights.

    layers             a decoder's matrices and constants, read off a model of transformers
    decoder            slots (keys, values and state of each row), prefill, recorded steps
    kernels            a single row's step as five Triton kernels a layer
    few_rows           several rows times a packed matrix, by Triton
    engine             batches, static and continuous; texts may come from any thread
    server             the same behind OpenAI's protocol, as a process of its own

A step is a CUDA graph on NVIDIA cards and compiled by the bridge on Gaudi cards (not run yet); on a
CPU it is plain or compiled torch, for tests rather than speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from workloads.base import JobDescription, Refusal, Request, supported, unsupported
from workloads.devices import device_spec
from workloads.engines.base import (
    Ability,
    CompileSettings,
    EngineSpec,
    GaudiSettings,
    Modes,
    Package,
    ServerCommand,
    ServerPlace,
    ServerSettings,
    python_command,
)

_STORED = {
    "fp8": "float8 (e4m3) with one scale per output channel",
    "int8": "int8 with one scale per output channel",
    "int4": "4-bit integers with one scale for 64 weights of a row",
}
_PRODUCTS = {
    "cuda": "products in bf16",
    "cpu": "expanded to bf16 for each product, so slower than bf16",
}


class StepSettings(GaudiSettings, CompileSettings):
    """Settings of how a step runs."""


class ServedStepSettings(StepSettings, ServerSettings):
    """Settings of a server's steps."""


#: Holds the key that requests to a server must bear.
KEY_VARIABLE = "NIGHTGRID_SERVER_KEY"
_SERVED_TEXTS = 16  # at a time, unless the job says otherwise


def serve(request: Request, place: ServerPlace) -> ServerCommand:
    """The command of ``server.py`` for a job; see ``engines.base``."""
    settings = dict(request.settings)
    slots, positions = settings.pop("max_sequences", None), settings.pop("max_model_len", None)
    arguments = {
        "model": request.model,
        "precision": request.precision,
        "device": place.device,
        "host": place.host,
        "port": place.port,
        "threads": place.threads,
        "max-num-seqs": slots or _SERVED_TEXTS,
        "max-model-len": positions,
        "settings": json.dumps({n: v for n, v in settings.items() if v is not None}),
    }
    return ServerCommand(
        arguments=python_command("workloads.engines.graph.server", options=arguments),
        environment={KEY_VARIABLE: place.key},
        model=request.model,
        counters={
            "server_running": "nightgrid:requests_running",
            "server_waiting": "nightgrid:requests_waiting",
            "server_kv_cache": "nightgrid:kv_cache_usage",
        },
    )


def _refuse(job: JobDescription) -> Iterator[Refusal]:
    """Refuse ``torch_compile`` where steps are always compiled."""
    device = device_spec(job.device)
    always = device.can("graphs") or not device.can("dynamic_shapes")
    if job.parameters.get("torch_compile") and always:
        reason = f"on {device.title} the engine graph compiles its step always"
        hint = "leave torch_compile out"
        yield Refusal(setting="torch_compile", reason=reason, hint=hint, unsupported=True)


SPEC = EngineSpec(
    name="graph",
    summary="Decoding by recorded steps over a static cache (CUDA graphs), packed weights.",
    devices=("cpu", "cuda", "hpu"),
    abilities={
        "generate": Ability(
            function="workloads.engines.graph.engine:load",
            tasks=("causal-lm",),
            refuse=_refuse,
            settings=StepSettings,
        ),
        "serve": Ability(
            function="workloads.engines.graph:serve",
            tasks=("causal-lm",),
            refuse=_refuse,
            settings=ServedStepSettings,
            default=True,
        ),
    },
    install="pip install transformers",
    packages=(Package(name="transformers", module="transformers"),),
    own_process=False,
    opens_protected=True,
    features=frozenset({"continuous_batching"}),
    modes={
        "hpu": Modes(
            setting="hpu_mode",
            names=("compile",),
            lacking={
                "lazy": "hands torch's graphs of a step to the card",
                "eager": "hands torch's graphs of a step to the card",
            },
        )
    },
    precisions={
        **{
            (precision, device): supported(f"{stored}; weights only, {products}")
            for device, products in _PRODUCTS.items()
            for precision, stored in _STORED.items()
        },
        **{
            (precision, "hpu"): unsupported(
                "no kernel of the engine graph reads packed weights on Gaudi cards"
            )
            for precision in _STORED
        },
    },
)
