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
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement
from workloads.util.files import read_text

#: Latencies and rates by their names here, with those of llm-d, AIPerf and vLLM.
_LATENCIES = {
    "ttft": ("time_to_first_token", "time_to_first_token", "ttft"),
    "tpot": ("time_per_output_token", "inter_token_latency", "tpot"),
    "itl": ("inter_token_latency", "inter_chunk_latency", "itl"),
    "latency": ("request_latency", "request_latency", "e2el"),
}
_RATES = {
    "output_tokens_per_s": ("output_token_rate", "output_token_throughput", "output_throughput"),
    "total_tokens_per_s": (
        "total_token_rate",
        "total_token_throughput",
        "total_token_throughput",
    ),
    "requests_per_s": ("request_rate", "request_throughput", "request_throughput"),
}
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
    for name in _LATENCIES:
        if known := _known(**{part: row.reported(f"{name}_{part}_s") for part in _PARTS}):
            latencies[name] = known
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
        rates=_known(**{name: row.reported(name) for name in _RATES}),
        latencies=latencies,
    )


def _known(**values: Any) -> dict[str, Any]:
    """Return the values that are not None, by name."""
    return {name: value for name, value in values.items() if value is not None}


def _at(document: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a dotted path; None where it is missing."""
    value: Any = document
    for key in path.split("."):
        value = (value or {}).get(key)
    return value


def _mean(value: float | None, units: str = "count") -> dict[str, Any] | None:
    return None if value is None else {"units": units, "mean": value}


def _parts(values: Mapping[str, Any], scale: float) -> dict[str, float]:
    return {part: values[part] * scale for part in _PARTS if values.get(part) is not None}


def _moment(result: Exchange) -> datetime | None:
    return (
        None if result.ended_at is None else datetime.fromtimestamp(result.ended_at, timezone.utc)
    )


def _epoch(text: object) -> float | None:
    if isinstance(text, datetime):
        return text.timestamp()
    return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp() if text else None


def _finite(value: object) -> float | None:
    """The number; None for infinity, and for what is no number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---------------------------------------------------------------- llm-d's benchmark report 0.2


def to_llm_d(result: Exchange) -> dict[str, Any]:
    """Return llm-d's benchmark report 0.2; unknown facts are left out where it allows that."""
    identity = hashlib.sha256(repr(result).encode()).hexdigest()[:32]
    end, took_s, written = _moment(result), result.duration_s, result.output_tokens
    time = _known(
        end=None if end is None else end.isoformat(),
        duration=None if took_s is None else f"PT{took_s:.9g}S",
    )
    engine = {
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
    }
    load = {
        "tool": "nightgrid",
        "tool_version": "",
        "source": "unknown",
        "input_seq_len": {"distribution": "other", "value": result.input_tokens or 0},
        **_known(
            output_seq_len=None if written is None else {"distribution": "other", "value": written},
            concurrency=result.concurrency,
            rate_qps=result.request_rate,
        ),
    }
    aggregate = {
        "requests": _known(
            total=(result.requests or 0) + (result.failures or 0),
            failures=result.failures,
            input_length=_mean(result.input_tokens),
            output_length=_mean(written),
        ),
        "throughput": {
            _RATES[name][0]: _mean(value, "queries/s" if name == "requests_per_s" else "tokens/s")
            for name, value in result.rates.items()
        },
        "latency": {
            _LATENCIES[name][0]: {"units": "s/token" if name in ("tpot", "itl") else "s", **parts}
            for name, parts in result.latencies.items()
            if "mean" in parts
        },
    }
    server = {"metadata": {"label": "server", "cfg_id": identity}, "standardized": engine}
    sent = {"metadata": {"cfg_id": identity}, "standardized": load}
    return {
        "version": "0.2",
        "run": {"uid": identity, **_known(time=time or None)},
        "scenario": {"stack": [server | {"native": {}}], "load": sent | {"native": {}}},
        "results": {"request_performance": {"aggregate": aggregate}},
    }


def from_llm_d(report: Mapping[str, Any]) -> Exchange:
    """Read llm-d's benchmark report 0.2 or 0.2.1; raises KeyError, TypeError or ValueError."""
    aggregate = report["results"]["request_performance"]["aggregate"]
    stack = [one["standardized"] for one in report["scenario"].get("stack") or ()]
    engine: Mapping[str, Any] = next(
        (one for one in stack if one.get("kind") == "inference_engine"), {}
    )
    load = _at(report, "scenario.load.standardized") or {}
    throughput, latency = aggregate.get("throughput") or {}, aggregate.get("latency") or {}
    total, failures = _at(aggregate, "requests.total"), _at(aggregate, "requests.failures")
    users = _finite(load.get("concurrency"))
    return Exchange(
        model=_at(engine, "model.name") or "",
        engine=engine.get("tool", ""),
        engine_version=engine.get("tool_version", ""),
        device=_at(engine, "accelerator.model") or "",
        cards=_at(engine, "accelerator.count") or None,
        tensor_parallel=_at(engine, "accelerator.parallelism.tp") or None,
        concurrency=int(users) if users else None,
        request_rate=load.get("rate_qps"),
        input_tokens=_at(aggregate, "requests.input_length.mean"),
        output_tokens=_at(aggregate, "requests.output_length.mean"),
        requests=None if total is None else total - (failures or 0),
        failures=failures,
        duration_s=_seconds(_at(report, "run.time.duration")),
        ended_at=_epoch(_at(report, "run.time.end")),
        rates={
            name: float(throughput[theirs]["mean"])
            for name, (theirs, _, _) in _RATES.items()
            if throughput.get(theirs)
        },
        latencies={
            name: _parts(latency[theirs], 1e-3 if latency[theirs]["units"].startswith("ms") else 1)
            for name, (theirs, _, _) in _LATENCIES.items()
            if latency.get(theirs)
        },
    )


def _seconds(duration: object) -> float | None:
    """Read an ISO 8601 duration of seconds, minutes and hours (``PT1M2.5S``), or a number."""
    parts = re.findall(r"([\d.]+)([HMS]?)", str(duration or "").removeprefix("PT"))
    return sum(float(n) * {"H": 3600, "M": 60}.get(unit, 1) for n, unit in parts) or None


# ---------------------------------------------------------------- AIPerf

#: Averages of AIPerf by the field here, with their unit.
_AVERAGES = {
    "input_tokens": ("input_sequence_length", "tokens"),
    "output_tokens": ("output_sequence_length", "tokens"),
    "requests": ("request_count", "requests"),
    "failures": ("error_request_count", "requests"),
    "duration_s": ("benchmark_duration", "sec"),
}


def to_aiperf(result: Exchange) -> dict[str, Any]:
    """Return the object of AIPerf's ``profile_export_aiperf.json``."""
    averages = {
        _RATES[name][1]: (value, "requests/sec" if name == "requests_per_s" else "tokens/sec")
        for name, value in result.rates.items()
    }
    averages |= {theirs: (getattr(result, n), unit) for n, (theirs, unit) in _AVERAGES.items()}
    exported: dict[str, Any] = {
        name: {"unit": unit, "avg": n} for name, (n, unit) in averages.items() if n is not None
    }
    for name, parts in result.latencies.items():
        scaled = {"avg" if part == "mean" else part: value * 1000 for part, value in parts.items()}
        exported[_LATENCIES[name][1]] = {"unit": "ms", **scaled}
    exported["input_config"] = {
        "endpoint": {"model_names": [result.model], "streaming": "ttft" in result.latencies},
        "loadgen": _known(concurrency=result.concurrency, request_rate=result.request_rate),
    }
    if (end := _moment(result)) is not None:
        exported["end_time"] = end.replace(tzinfo=None).isoformat()
    return exported


def from_aiperf(exported: Mapping[str, Any]) -> Exchange:
    """Read the object of AIPerf's export; raises KeyError, TypeError or ValueError."""
    facts = {name: _at(exported, f"{theirs}.avg") for name, (theirs, _) in _AVERAGES.items()}
    for name in ("requests", "failures"):
        facts[name] = None if facts[name] is None else round(facts[name])
    latencies = {}
    for name, (_, theirs, _) in _LATENCIES.items():
        if values := exported.get(theirs):
            scale = {"ms": 1e-3, "s": 1, "sec": 1, "us": 1e-6, "ns": 1e-9}[values["unit"]]
            latencies[name] = _parts({**values, "mean": values.get("avg")}, scale)
    ended = exported.get("end_time")
    return Exchange(
        model=", ".join(_at(exported, "input_config.endpoint.model_names") or ()),
        concurrency=_at(exported, "input_config.loadgen.concurrency"),
        request_rate=_at(exported, "input_config.loadgen.request_rate"),
        ended_at=_epoch(f"{ended}+00:00") if ended else None,
        rates=_known(**{n: _at(exported, f"{theirs}.avg") for n, (_, theirs, _) in _RATES.items()}),
        latencies=latencies,
        **facts,
    )


# ---------------------------------------------------------------- vLLM


def to_vllm(result: Exchange) -> dict[str, Any]:
    """Return the object that ``vllm bench serve --save-result`` writes."""
    requests, failures = result.requests or 0, result.failures or 0
    end, read, written = _moment(result), result.input_tokens, result.output_tokens
    exported = {
        "backend": "openai",
        "label": None,
        "model_id": result.model,
        "num_prompts": requests + failures,
        "request_rate": "inf" if result.request_rate is None else result.request_rate,
        "max_concurrency": result.concurrency,
        "completed": requests,
        "failed": failures,
        **_known(
            date=None if end is None else end.strftime(_DATE),
            duration=result.duration_s,
            total_input_tokens=None if read is None else round(read * requests),
            total_output_tokens=None if written is None else round(written * requests),
        ),
    }
    exported |= {_RATES[name][2]: value for name, value in result.rates.items()}
    for name, parts in result.latencies.items():
        exported |= {_vllm_key(name, part): value * 1000 for part, value in parts.items()}
    return exported


_DATE = "%Y%m%d-%H%M%S"


def _vllm_key(name: str, part: str) -> str:
    return f"{'median' if part == 'p50' else part}_{_LATENCIES[name][2]}_ms"


def from_vllm(exported: Mapping[str, Any]) -> Exchange:
    """Read the object that ``vllm bench serve`` wrote; raises KeyError, TypeError or ValueError."""
    requests, date = int(exported["completed"]), exported.get("date")
    latencies = {}
    for name in _LATENCIES:
        values = {part: exported.get(_vllm_key(name, part)) for part in _PARTS}
        if known := _parts(values, 1e-3):
            latencies[name] = known
    read, written = (exported.get(f"total_{name}_tokens") for name in ("input", "output"))
    ended = datetime.strptime(date, _DATE).replace(tzinfo=timezone.utc) if date else None
    return Exchange(
        model=exported["model_id"],
        engine=exported.get("backend", ""),
        concurrency=exported.get("max_concurrency"),
        request_rate=_finite(exported.get("request_rate")),
        input_tokens=None if read is None or not requests else read / requests,
        output_tokens=None if written is None or not requests else written / requests,
        requests=requests,
        failures=exported.get("failed", int(exported["num_prompts"]) - requests),
        duration_s=exported.get("duration"),
        ended_at=_epoch(ended),
        rates={n: exported[key] for n, (_, _, key) in _RATES.items() if key in exported},
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
