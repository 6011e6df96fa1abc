"""SGLang as a server. Not run yet in this project: its packages need an NVIDIA card."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.base import JobDescription, OutOfMemory, Refusal, Request
from workloads.engines.base import (
    DTYPES,
    Ability,
    EngineSpec,
    Package,
    ScheduledServerSettings,
    ServerCommand,
    ServerPlace,
    python_command,
    refuse_idle_draft,
)

_PRECISIONS = ("fp16", "bf16", "fp8")


def _refuse(job: JobDescription) -> Iterator[Refusal]:
    if job.precision not in _PRECISIONS:
        reason = f"with SGLang this version asks for {', '.join(_PRECISIONS)}"
        yield Refusal(setting="precision", reason=reason, unsupported=True)
    yield from refuse_idle_draft(job)


def serve(request: Request, place: ServerPlace) -> ServerCommand:
    """The command of SGLang's server; its key is on the command line, which other users of the
    host can read (it has no variable for it)."""
    from workloads.models.loading import open_model

    source, settings = open_model(request.model), request.settings
    guesses, draft = settings.get("speculative_tokens"), settings.get("draft_model")
    arguments = {
        "model-path": source.path,
        "tokenizer-path": source.tokenizer_path,
        "served-model-name": request.model,
        "host": place.host,
        "port": place.port,
        "api-key": place.key,
        "dtype": DTYPES.get(request.precision, "bfloat16"),
        "load-format": "dummy" if source.entry.kind == "random" else None,
        "quantization": "fp8" if request.precision == "fp8" else None,
        "tp-size": settings.get("tensor_parallel"),
        "pp-size": settings.get("pipeline_parallel"),
        "dp-size": settings.get("data_parallel"),
        "max-running-requests": settings.get("max_sequences"),
        "context-length": settings.get("max_model_len"),
        "max-prefill-tokens": settings.get("max_batched_tokens"),
        "chunked-prefill-size": -1 if settings.get("chunked_prefill") is False else None,
        "kv-cache-dtype": settings.get("kv_cache_dtype"),
        "speculative-algorithm": ("STANDALONE" if draft else "NGRAM") if guesses else None,
        "speculative-num-draft-tokens": guesses,
        "speculative-draft-model-path": open_model(draft).path if draft else None,
    }
    switches = ["enable-metrics"]
    if not settings.get("prefix_caching"):
        switches.append("disable-radix-cache")
    if source.remote_code:
        switches.append("trust-remote-code")
    return ServerCommand(
        arguments=python_command("sglang.launch_server", options=arguments, switches=switches),
        model=request.model,
        counters={
            "server_running": "sglang:num_running_reqs",
            "server_waiting": "sglang:num_queue_reqs",
            "server_kv_cache": "sglang:token_usage",
        },
    )


SPEC = EngineSpec(
    name="sglang",
    summary="SGLang: a server with continuous batching and a tree of shared beginnings.",
    devices=("cuda",),
    abilities={
        "serve": Ability(
            function="workloads.engines.sglang:serve",
            tasks=("causal-lm",),
            refuse=_refuse,
            settings=ScheduledServerSettings,
            random_weights=True,
        )
    },
    install="pip install sglang (in an environment of its own: it pins torch and transformers)",
    packages=(Package(name="sglang", module="sglang"),),
    in_images=False,
    own_loader=True,
    errors={OutOfMemory: ("not enough memory. please try to increase --mem-fraction-static",)},
)
