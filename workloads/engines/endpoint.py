"""A server of OpenAI's protocol that is there already: nothing is started or stopped.

Its key comes from a file or an environment variable of the node, never from the grid, so no row has
it. What hardware answers is unknown: the job's card only waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from workloads.base import BadConfiguration, DataMissing, JobDescription, Refusal, Request
from workloads.engines.base import Ability, EngineSpec, Package, ServerCommand, ServerPlace
from workloads.settings import Settings, load_choice, neutral


class EndpointSettings(Settings):
    """Address of a server, its model's name and where its key is."""

    url: str = load_choice(
        "",
        description="Address of a server that is there already, up to and without /v1.",
    )
    served_model: str = load_choice(
        "",
        description="Name of the model in requests to `url`. Left out: that of the job.",
    )
    key_file: str = neutral("", description="File on the nodes with the key of `url`.")
    key_variable: str = neutral(
        "OPENAI_API_KEY",
        description="Environment variable of the nodes with the key of `url`; it may be unset.",
    )


def _refuse(job: JobDescription) -> Iterator[Refusal]:
    url = str(job.parameters.get("url") or "")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        reason = "the engine endpoint needs the address of a server"
        yield Refusal(setting="url", reason=reason, hint="write url: http://HOST:PORT")
    elif parts.username or parts.password:
        reason = "a key in an address would be in every row"
        yield Refusal(setting="url", reason=reason, hint="write key_file or key_variable")


def serve(request: Request, place: ServerPlace) -> ServerCommand:
    """The address and key of a job's server; DataMissing without its key's file."""
    settings = request.settings
    url = str(settings["url"]).rstrip("/").removesuffix("/v1")
    key = os.environ.get(str(settings.get("key_variable") or ""), "")
    if name := settings.get("key_file"):
        try:
            key = Path(name).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DataMissing(f"key_file {name}: {error}") from None
        if not key:
            raise BadConfiguration(f"key_file {name} is empty")
    return ServerCommand(
        url=url,
        key=key,
        model=str(settings.get("served_model") or request.model),
        health="/v1/models",
        counters={
            "server_running": "vllm:num_requests_running",
            "server_waiting": "vllm:num_requests_waiting",
        },
    )


SPEC = EngineSpec(
    name="endpoint",
    summary="A server of OpenAI's protocol that is there already (workload serving).",
    also_called=("openai", "http"),
    devices=("cpu", "cuda", "hpu"),
    abilities={
        "serve": Ability(
            function="workloads.engines.endpoint:serve",
            tasks=("causal-lm",),
            refuse=_refuse,
            settings=EndpointSettings,
        )
    },
    install="pip install aiohttp",
    packages=(Package(name="aiohttp", module="aiohttp"),),  # of the load generator
    own_process=False,
    own_loader=True,
)
