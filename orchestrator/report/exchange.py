"""Results of served models in the formats of others: llm-d's benchmark report, AIPerf, vLLM.

``Exchange`` is what all of them can say of one load: its setting, its rates and the distributions
of its latencies. llm-d's benchmark report 0.2 is the one format that several tools are converted
to; AIPerf's ``profile_export_aiperf.json`` and the JSON of ``vllm bench serve`` are their own.

Two names differ: AIPerf's ``inter_token_latency`` is a request's mean time per token after its
first, which vLLM, llm-d and this project call TPOT; the gap between events is its
``inter_chunk_latency``. Times are seconds here and in llm-d, milliseconds in the other two.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement
from workloads.util.files import read_text

#: Latencies by their name here, and in the others' formats.
_LLM_D = {
    "ttft": ("time_to_first_token", "s"),
    "tpot": ("time_per_output_token", "s/token"),
    "itl": ("inter_token_latency", "s/token"),
    "latency": ("request_latency", "s"),
}
_AIPERF = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "latency": "request_latency",
}
_VLLM = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "latency": "e2el"}

#: Rates by their metric's name here, and in llm-d's and AIPerf's formats with their units.
_RATES = {
    "output_tokens_per_s": ("output_token_rate", "tokens/s", "output_token_throughput"),
    "total_tokens_per_s": ("total_token_rate", "tokens/s", "total_token_throughput"),
    "requests_per_s": ("request_rate", "queries/s", "request_throughput"),
}
_VLLM_RATES = {
    "output_tokens_per_s": "output_throughput",
    "total_tokens_per_s": "total_token_throughput",
    "requests_per_s": "request_throughput",
}
_AIPERF_UNITS = {"requests_per_s": "requests/sec"}
_PARTS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One load of one server. Times are seconds; None and missing names: unknown."""

    model: str
    engine: str = ""
    engine_version: str = ""
    device: str = ""
    cards: int | None = None
    tensor_parallel: int | None = None
    concurrency: int | None = None
    request_rate: float | None = None
    input_tokens: float | None = None  # mean length
    output_tokens: float | None = None
    requests: int | None = None  # measured, without failures
    failures: int | None = None
    duration_s: float | None = None
    ended_at: float | None = None  # seconds since the epoch
    rates: Mapping[str, float] = field(default_factory=dict)  # by the names of ``_RATES``
    latencies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # name, part


def of_row(row: Measurement) -> Exchange | None:
    """Return what a row of a served model says; None for other rows."""
    if row.reported("output_tokens_per_s") is None:
        return None
    latencies = {}
    for name in _LLM_D:
        parts = {part: row.reported(f"{name}_{part}_s") for part in _PARTS}
        if known := {part: value for part, value in parts.items() if value is not None}:
            latencies[name] = known
    rates = {name: row.reported(name) for name in _RATES}
    share, requests = row.reported("error_share"), row.reported("requests_measured")
    failures = None
    if share is not None and requests is not None and share < 1:
        failures = round(requests * share / (1 - share))
    parallel = row.parameters.get("tensor_parallel")
    concurrency, rate = row.parameters.get("concurrency"), row.parameters.get("request_rate")
    return Exchange(
        model=row.model,
        engine=row.engine,
        engine_version=row.versions.get(row.engine, ""),
        device=row.device_name or str(row.accelerator),
        cards=row.cards,
        tensor_parallel=int(parallel) if parallel else None,
        concurrency=int(concurrency) if concurrency else None,
        request_rate=float(rate) if rate else None,
        input_tokens=row.reported("input_tokens_mean"),
        output_tokens=row.reported("output_tokens_mean"),
        requests=None if requests is None else round(requests),
        failures=failures,
        duration_s=row.reported("window_s"),
        ended_at=row.ended_at,
        rates={name: value for name, value in rates.items() if value is not None},
        latencies=latencies,
    )


# ---------------------------------------------------------------- llm-d's benchmark report 0.2


def to_llm_d(result: Exchange) -> dict[str, Any]:
    """Return llm-d's benchmark report 0.2; unknown facts are left out where it allows that."""
    requests: dict[str, Any] = {"total": (result.requests or 0) + (result.failures or 0)}
    if result.failures is not None:
        requests["failures"] = result.failures
    for name, value in (("input", result.input_tokens), ("output", result.output_tokens)):
        if value is not None:
            requests[f"{name}_length"] = {"units": "count", "mean": value}
    aggregate = {
        "requests": requests,
        "throughput": {
            _RATES[name][0]: {"units": _RATES[name][1], "mean": value}
            for name, value in result.rates.items()
        },
        "latency": {
            _LLM_D[name][0]: {"units": _LLM_D[name][1], **parts}
            for name, parts in result.latencies.items()
            if "mean" in parts
        },
    }
    identity = hashlib.sha256(repr(result).encode()).hexdigest()[:32]
    run: dict[str, Any] = {"uid": identity}
    time: dict[str, Any] = {}
    if result.ended_at is not None:
        time["end"] = datetime.fromtimestamp(result.ended_at, timezone.utc).isoformat()
    if result.duration_s is not None:
        time["duration"] = f"PT{result.duration_s:.9g}S"
    if time:
        run["time"] = time
    load: dict[str, Any] = {
        "tool": "nightgrid",
        "tool_version": "",
        "source": "unknown",
        "input_seq_len": {"distribution": "other", "value": result.input_tokens or 0},
    }
    if result.output_tokens is not None:
        load["output_seq_len"] = {"distribution": "other", "value": result.output_tokens}
    if result.concurrency is not None:
        load["concurrency"] = result.concurrency
    if result.request_rate is not None:
        load["rate_qps"] = result.request_rate
    return {
        "version": "0.2",
        "run": run,
        "scenario": {
            "stack": [_llm_d_engine(result, identity)],
            "load": {"metadata": {"cfg_id": identity}, "standardized": load, "native": {}},
        },
        "results": {"request_performance": {"aggregate": aggregate}},
    }


def _llm_d_engine(result: Exchange, identity: str) -> dict[str, Any]:
    return {
        "metadata": {"label": "server", "cfg_id": identity},
        "standardized": {
            "kind": "inference_engine",
            "tool": result.engine,
            "tool_version": result.engine_version,
            "role": "replica",
            "replicas": 1,
            "model": {"name": result.model},
            "accelerator": {
                "model": result.device,
                "count": result.cards or 0,
                "parallelism": {"tp": result.tensor_parallel or 0},
            },
        },
        "native": {},
    }


def from_llm_d(report: Mapping[str, Any]) -> Exchange:
    """Read llm-d's benchmark report 0.2 or 0.2.1; raises KeyError, TypeError or ValueError."""
    aggregate = report["results"]["request_performance"]["aggregate"]
    engine: Mapping[str, Any] = next(
        (
            one["standardized"]
            for one in report["scenario"].get("stack") or ()
            if one["standardized"].get("kind") == "inference_engine"
        ),
        {},
    )
    load = (report["scenario"].get("load") or {}).get("standardized") or {}
    card, requests = engine.get("accelerator") or {}, aggregate.get("requests") or {}
    throughput, latency = aggregate.get("throughput") or {}, aggregate.get("latency") or {}
    time = (report.get("run") or {}).get("time") or {}
    failures = requests.get("failures")
    total = requests.get("total")
    concurrency = load.get("concurrency")
    return Exchange(
        model=(engine.get("model") or {}).get("name", ""),
        engine=engine.get("tool", ""),
        engine_version=engine.get("tool_version", ""),
        device=card.get("model", ""),
        cards=card.get("count") or None,
        tensor_parallel=(card.get("parallelism") or {}).get("tp") or None,
        concurrency=int(finite) if (finite := _finite(concurrency)) else None,
        request_rate=load.get("rate_qps"),
        input_tokens=(requests.get("input_length") or {}).get("mean"),
        output_tokens=(requests.get("output_length") or {}).get("mean"),
        requests=None if total is None else total - (failures or 0),
        failures=failures,
        duration_s=_seconds(time.get("duration")),
        ended_at=_epoch(time.get("end")),
        rates={
            name: float(throughput[theirs]["mean"])
            for name, (theirs, _, _) in _RATES.items()
            if throughput.get(theirs)
        },
        latencies={
            name: _parts(latency[theirs], 1e-3 if latency[theirs]["units"].startswith("ms") else 1)
            for name, (theirs, _) in _LLM_D.items()
            if latency.get(theirs)
        },
    )


def _parts(values: Mapping[str, Any], scale: float) -> dict[str, float]:
    return {part: values[part] * scale for part in _PARTS if values.get(part) is not None}


def _seconds(duration: object) -> float | None:
    """Read an ISO 8601 duration of seconds, minutes and hours (``PT1M2.5S``), or a number."""
    text = str(duration or "").removeprefix("PT")
    total, number = 0.0, ""
    for letter in text:
        if letter in "HMS":
            total += float(number) * {"H": 3600, "M": 60, "S": 1}[letter]
            number = ""
        else:
            number += letter
    return float(number) if number else total or None


def _epoch(text: object) -> float | None:
    if isinstance(text, datetime):
        return text.timestamp()
    return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp() if text else None


def _finite(value: object) -> float | None:
    """The number; None for infinity, and for what is no number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---------------------------------------------------------------- AIPerf


def to_aiperf(result: Exchange) -> dict[str, Any]:
    """Return the object of AIPerf's ``profile_export_aiperf.json``."""
    exported: dict[str, Any] = {}
    for name, value in result.rates.items():
        unit = _AIPERF_UNITS.get(name, "tokens/sec")
        exported[_RATES[name][2]] = {"unit": unit, "avg": value}
    for name, parts in result.latencies.items():
        scaled = {_AVG.get(part, part): value * 1000 for part, value in parts.items()}
        exported[_AIPERF[name]] = {"unit": "ms", **scaled}
    counts: tuple[tuple[str, float | None, str], ...] = (
        ("input_sequence_length", result.input_tokens, "tokens"),
        ("output_sequence_length", result.output_tokens, "tokens"),
        ("request_count", result.requests, "requests"),
        ("error_request_count", result.failures, "requests"),
        ("benchmark_duration", result.duration_s, "sec"),
    )
    exported |= {name: {"unit": unit, "avg": n} for name, n, unit in counts if n is not None}
    load = {"concurrency": result.concurrency, "request_rate": result.request_rate}
    exported["input_config"] = {
        "endpoint": {"model_names": [result.model], "streaming": "ttft" in result.latencies},
        "loadgen": {name: value for name, value in load.items() if value is not None},
    }
    if result.ended_at is not None:
        end = datetime.fromtimestamp(result.ended_at, timezone.utc).replace(tzinfo=None)
        exported["end_time"] = end.isoformat()
    return exported


_AVG = {"mean": "avg"}


def from_aiperf(exported: Mapping[str, Any]) -> Exchange:
    """Read the object of AIPerf's export; raises KeyError, TypeError or ValueError."""

    def average(name: str) -> float | None:
        return (exported.get(name) or {}).get("avg")

    def whole(name: str) -> int | None:
        value = average(name)
        return None if value is None else round(value)

    config = exported.get("input_config") or {}
    load = config.get("loadgen") or {}
    latencies = {}
    for name, theirs in _AIPERF.items():
        if values := exported.get(theirs):
            scale = {"ms": 1e-3, "s": 1, "sec": 1, "us": 1e-6, "ns": 1e-9}[values["unit"]]
            latencies[name] = _parts({**values, "mean": values.get("avg")}, scale)
    rates = {name: average(theirs) for name, (_, _, theirs) in _RATES.items()}
    ended = exported.get("end_time")
    return Exchange(
        model=", ".join((config.get("endpoint") or {}).get("model_names") or ()),
        concurrency=load.get("concurrency"),
        request_rate=load.get("request_rate"),
        input_tokens=average("input_sequence_length"),
        output_tokens=average("output_sequence_length"),
        requests=whole("request_count"),
        failures=whole("error_request_count"),
        duration_s=average("benchmark_duration"),
        ended_at=_epoch(f"{ended}+00:00") if ended else None,
        rates={name: value for name, value in rates.items() if value is not None},
        latencies=latencies,
    )


# ---------------------------------------------------------------- vLLM


def to_vllm(result: Exchange) -> dict[str, Any]:
    """Return the object that ``vllm bench serve --save-result`` writes."""
    requests, failures = result.requests or 0, result.failures or 0
    exported: dict[str, Any] = {
        "backend": "openai",
        "label": None,
        "model_id": result.model,
        "num_prompts": requests + failures,
        "request_rate": "inf" if result.request_rate is None else result.request_rate,
        "max_concurrency": result.concurrency,
        "completed": requests,
        "failed": failures,
    }
    if result.ended_at is not None:
        end = datetime.fromtimestamp(result.ended_at, timezone.utc)
        exported["date"] = end.strftime("%Y%m%d-%H%M%S")
    if result.duration_s is not None:
        exported["duration"] = result.duration_s
    for name, value in (("input", result.input_tokens), ("output", result.output_tokens)):
        if value is not None:
            exported[f"total_{name}_tokens"] = round(value * requests)
    for name, value in result.rates.items():
        exported[_VLLM_RATES[name]] = value
    for name, parts in result.latencies.items():
        for part, value in parts.items():
            exported[f"{_MEDIAN.get(part, part)}_{_VLLM[name]}_ms"] = value * 1000
    return exported


_MEDIAN = {"p50": "median"}


def from_vllm(exported: Mapping[str, Any]) -> Exchange:
    """Read the object that ``vllm bench serve`` wrote; raises KeyError, TypeError or ValueError."""
    requests = int(exported["completed"])
    latencies = {}
    for name, theirs in _VLLM.items():
        keys = {part: f"{_MEDIAN.get(part, part)}_{theirs}_ms" for part in _PARTS}
        known = {part: exported[key] / 1000 for part, key in keys.items() if key in exported}
        if known:
            latencies[name] = known
    rate, date = exported.get("request_rate"), exported.get("date")
    ended = datetime.strptime(date, "%Y%m%d-%H%M%S") if date else None
    lengths = {
        name: exported[key] / requests if requests and key in exported else None
        for name, key in (("input", "total_input_tokens"), ("output", "total_output_tokens"))
    }
    return Exchange(
        model=exported["model_id"],
        engine=exported.get("backend", ""),
        concurrency=exported.get("max_concurrency"),
        request_rate=_finite(rate),
        input_tokens=lengths["input"],
        output_tokens=lengths["output"],
        requests=requests,
        failures=exported.get("failed", int(exported["num_prompts"]) - requests),
        duration_s=exported.get("duration"),
        ended_at=ended.replace(tzinfo=timezone.utc).timestamp() if ended else None,
        rates={n: exported[key] for n, key in _VLLM_RATES.items() if key in exported},
        latencies=latencies,
    )


# ---------------------------------------------------------------- files

#: Formats by name: what writes them, and what reads them.
FORMATS: dict[
    str, tuple[Callable[[Exchange], dict[str, Any]], Callable[[Mapping[str, Any]], Exchange]]
] = {
    "llm-d": (to_llm_d, from_llm_d),
    "aiperf": (to_aiperf, from_aiperf),
    "vllm-bench": (to_vllm, from_vllm),
}


def format_of(content: object) -> str:
    """Return the format of a read object; "" if it is none of ``FORMATS``."""
    if not isinstance(content, Mapping):
        return ""
    if {"scenario", "results"} <= content.keys():
        return "llm-d"
    if {"model_id", "completed"} <= content.keys():
        return "vllm-bench"
    return "aiperf" if "request_latency" in content or "request_throughput" in content else ""


def read(path: Path) -> Exchange:
    """Read a result in any of ``FORMATS``, as JSON or YAML.

    Raises:
        StoreError: it cannot be read, or is none of them; the message says what is wrong.
    """
    import yaml

    try:
        text = read_text(path)
        content = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StoreError(f"{path}: {error}") from error
    name = format_of(content)
    if not name:
        raise StoreError(f"{path} is none of the formats {', '.join(FORMATS)}")
    try:
        return FORMATS[name][1](content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path} looks like {name}'s format, but not whole: {type(error).__name__}: {error}"
        ) from error


def write(result: Exchange, name: str) -> str:
    """Return a result as a line of JSON in one of ``FORMATS``."""
    return json.dumps(FORMATS[name][0](result), allow_nan=False) + "\n"


def lines(rows: Iterable[Measurement], name: str) -> Iterator[str]:
    """Yield a line of JSON for each row of a served model."""
    return (write(result, name) for row in rows if (result := of_row(row)) is not None)
