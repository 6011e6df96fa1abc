"""Declaration of the workload serving: settings of a load, and its rules (``run.py`` measures it).

A load is a closed loop of users or an open one of arrivals, of random tokens, a dataset's prompts
or a recorded trace. Settings of the load are not part of the residency key, so one start of a
server serves all loads of its settings. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from workloads.base import TOKENS, BadConfiguration, JobDescription, Metric, Refusal
from workloads.data.datasets import DatasetParameters
from workloads.devices import device_spec
from workloads.engines.base import SERVER_FIGURES
from workloads.registry import WorkloadSpec
from workloads.serving import load as loads
from workloads.serving import statistics
from workloads.settings import choice, neutral, work


class ServingParameters(DatasetParameters):
    """A load on a served model: who asks, how often, with what, and what is expected."""

    concurrency: int | None = work(
        None,
        ge=1,
        description="Users of a closed loop: each sends its next request when the last has ended.",
    )
    request_rate: float | None = work(
        None,
        gt=0,
        description="Requests a second of an open loop, sent whatever the server does.",
    )
    arrivals: str = work(
        "poisson",
        description="When an open loop's requests come: poisson, constant, gamma(shape), "
        "bursts(size) or ramp(start rate).",
    )
    input_tokens: int | str | None = work(
        None,
        description="Length of prompts of random tokens: a number, uniform(least, largest), "
        "normal(mean, deviation) or lognormal(median, deviation). Left out: prompts of `dataset`.",
    )
    output_tokens: int | str = work(
        128, description="Most tokens of an answer: a number or a distribution, as input_tokens."
    )
    shared_prefix: int = work(
        0, ge=0, description="Tokens at the start of random prompts that others have too."
    )
    turns: int = work(
        1,
        ge=1,
        description="Turns of each conversation of random tokens; a prompt is all before it.",
    )
    trace: str = work(
        "",
        description="File of a recorded load in Mooncake's format (JSON lines), with times and "
        "lengths of its own; with concurrency, its lengths alone.",
    )
    ignore_eos: bool = work(
        False,
        description="Generate exactly output_tokens for each request, even past an end-of-sequence "
        "token.",
    )
    requests: int | None = work(
        None,
        ge=1,
        description="Requests of each repeat. Left out: 10 for each user or second, at least 50 "
        "and two conversations for each user, and repeats go on until p99 is known (459 requests).",
    )
    stream: bool = choice(True, description="Stream tokens; without, there is no TTFT.")
    api: Literal["completions", "chat"] | None = choice(
        None,
        description="Protocol of requests. Left out: chat for prompts of a dataset, else "
        "completions.",
    )
    slo: str = neutral(
        "",
        description="Limits of goodput in seconds, `{ttft_s: 0.5, tpot_s: 0.05}`, of ttft_s, "
        "tpot_s, itl_s and latency_s.",
    )
    start_limit_s: float = neutral(
        1800.0, gt=0, description="Seconds in which a server must generate its first token."
    )


# ---------------------------------------------------------------- rules


def cards_of_a_server(settings: Mapping[str, Any]) -> int:
    """Cards that one server needs."""
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel")
    count = 1
    for name in names:
        count *= settings.get(name) or 1
    return count


def refuse(job: JobDescription) -> Iterator[Refusal]:
    """Objections to a job beyond those of its engine and model."""
    parameters = job.parameters
    device = device_spec(job.device)
    if device.can("exclusive") and not parameters.get("url"):
        yield Refusal(
            setting="engine",
            reason=f"on {device.title} only one process can hold a card, here the worker; a server "
            "would be a second",
            hint="write engine: endpoint and the url of a server that is there already",
            unsupported=True,
        )
    if job.batch_size != 1:
        yield Refusal(
            setting="batch_size",
            reason="a server makes its batches of what arrives",
            hint="leave it out; max_sequences limits them, and concurrency says how many ask",
        )
    loops = [name for name in ("concurrency", "request_rate") if parameters.get(name)]
    if len(loops) == 2 or not (loops or parameters.get("trace")):
        yield Refusal(
            setting=loops[-1] if loops else "concurrency",
            reason="a load is a closed loop (concurrency) or an open one (request_rate)",
            hint="write one of them",
        )
    users, requests = parameters.get("concurrency") or 0, parameters.get("requests")
    turns = parameters.get("turns") or 1 if parameters.get("input_tokens") is not None else 1
    if requests is not None and requests // turns < users:
        talks = f"in conversations of {turns} turns are fewer conversations" * (turns > 1)
        yield Refusal(
            setting="requests",
            reason=f"{requests} requests {talks or 'are fewer'} than {users} users",
            hint=f"write {users * turns} or more",
        )
    per_server = cards_of_a_server(parameters)
    if job.cards % per_server:
        yield Refusal(
            setting="cards",
            reason=f"servers of {per_server} cards each cannot share {job.cards}",
            hint=f"write a multiple of {per_server}",
        )
    checks: dict[str, Callable[[Any], object]] = {
        "input_tokens": loads.parse_lengths,
        "output_tokens": loads.parse_lengths,
        "arrivals": loads.parse_pattern,
        "slo": statistics.parse_slo,
    }
    for name, check in checks.items():
        value = parameters.get(name)
        if value is None:
            continue
        try:
            check(value)
        except BadConfiguration as error:
            yield Refusal(setting=name, reason=str(error))
    lengths = [parameters.get(name) for name in ("input_tokens", "output_tokens")]
    wanted = sum(length for length in lengths if isinstance(length, int))
    if (room := parameters.get("max_model_len")) is not None and wanted > room:
        yield Refusal(
            setting="max_model_len",
            reason=f"{wanted:,} tokens in and out are more than the {room:,} of a request",
            hint=f"write {wanted} or more",
        )
    if parameters.get("input_tokens") is not None and parameters.get("api") == "chat":
        yield Refusal(
            setting="api",
            reason="prompts of random tokens are sent as token ids, which the chat API has not",
            hint="leave api out, or leave input_tokens out for prompts of the dataset",
        )


SPEC = WorkloadSpec(
    name="serving",
    function="workloads.serving.run:run",
    also_called=("serve", "online", "server"),
    parameters=ServingParameters,
    summary="A served model under load: output tokens/s, TTFT, ITL, latency, goodput.",
    ability="serve",
    tasks=("causal-lm",),
    windows=True,
    first_axes={"concurrency": "[1, 2, 4, 8]"},
    throughput=TOKENS,
    metrics=(
        *statistics.METRICS,
        *(
            Metric(name=name, title=title, description=description)
            for name, (title, description) in SERVER_FIGURES.items()
        ),
    ),
    refuse=lambda job: tuple(refuse(job)),
)
