"""Exchange of results with other tools: round trips, and files as the tools write them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import measurements
import pytest
import yaml

from orchestrator.core.errors import StoreError
from orchestrator.report.exchange import FORMATS, Exchange, of_row, read, write

LATENCIES = {
    name: {"mean": base, "p50": base * 0.9, "p90": base * 1.5, "p99": base * 2}
    for name, base in (("ttft", 0.25), ("tpot", 0.02), ("itl", 0.021), ("latency", 3.5))
}
RATES = {"output_tokens_per_s": 800.0, "total_tokens_per_s": 1600.0, "requests_per_s": 6.25}
RESULT = Exchange(
    model="Qwen/Qwen3-0.6B",
    engine="vllm",
    engine_version="0.32.0",
    device="Gaudi2",
    cards=8,
    tensor_parallel=4,
    concurrency=16,
    input_tokens=128.0,
    output_tokens=64.0,
    requests=500,
    failures=3,
    duration_s=80.0,
    ended_at=1_770_000_000.0,
    rates=RATES,
    latencies=LATENCIES,
)
#: What a format has no place for.
LOST: dict[str, dict[str, Any]] = {
    "llm-d": {},
    "aiperf": dict.fromkeys(("engine", "engine_version", "device"), "")
    | dict.fromkeys(("cards", "tensor_parallel")),
    "vllm-bench": {"engine": "openai", "engine_version": "", "device": ""}
    | dict.fromkeys(("cards", "tensor_parallel")),
}


def close(one: Exchange, other: Exchange) -> None:
    """Both say the same, up to the rounding of milliseconds."""
    assert replace(one, latencies={}) == replace(other, latencies={})
    assert one.latencies.keys() == other.latencies.keys()
    for name, parts in one.latencies.items():
        assert other.latencies[name] == pytest.approx(parts), name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("load", [{}, {"concurrency": None, "request_rate": 2.5}])
def test_a_round_trip_keeps_what_the_format_has_a_place_for(
    name: str, load: dict[str, Any], tmp_path: Path
) -> None:
    result = replace(RESULT, **load)
    path = tmp_path / "result.json"
    path.write_text(write(result, name))
    close(replace(result, **LOST[name]), read(path))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_unknown_stays_unknown(name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    bare = Exchange(model="m", rates=RATES, requests=5, failures=0)
    path.write_text(write(bare, name))
    close(replace(bare, engine="openai" if name == "vllm-bench" else ""), read(path))


def test_a_row_says_the_same_in_every_format() -> None:
    figures = {
        f"{name}_{part}_s": v for name, parts in LATENCIES.items() for part, v in parts.items()
    }
    figures |= RATES | {"requests_measured": 500.0, "error_share": 3 / 503, "window_s": 80.0}
    figures |= {"input_tokens_mean": 128.0, "output_tokens_mean": 64.0}
    row = measurements.row(
        model="Qwen/Qwen3-0.6B",
        engine="vllm",
        versions={"vllm": "0.32.0"},
        device_name="Gaudi2",
        cards=8,
        parameters={"concurrency": 16, "tensor_parallel": 4},
        workload_metrics=figures,
        ended_at=1_770_000_000.0,
    )
    found = of_row(row)
    assert found is not None
    close(RESULT, found)
    assert of_row(measurements.row(1)) is None


def test_a_report_of_llm_d_has_its_required_parts_and_units() -> None:
    report = FORMATS["llm-d"][0](RESULT)
    assert report["version"] == "0.2" and report["run"]["uid"]
    (engine,) = report["scenario"]["stack"]
    assert engine["standardized"]["kind"] == "inference_engine" and engine["native"] == {}
    load = report["scenario"]["load"]
    assert {"tool", "tool_version", "source", "input_seq_len"} <= load["standardized"].keys()
    latency = report["results"]["request_performance"]["aggregate"]["latency"]
    units = {name: statistics["units"] for name, statistics in latency.items()}
    assert units == {
        "time_to_first_token": "s",
        "time_per_output_token": "s/token",
        "inter_token_latency": "s/token",
        "request_latency": "s",
    }


def test_files_of_the_tools_themselves_are_read(tmp_path: Path) -> None:
    aiperf = {
        "request_throughput": {"unit": "requests/sec", "avg": 5.0},
        "request_latency": {"unit": "ms", "avg": 900.0, "p50": 850.0, "min": 1.0, "std": 3.0},
        "inter_token_latency": {"unit": "ms", "avg": 12.0},
        "request_count": {"unit": "requests", "avg": 40.0},
        "input_config": {"endpoint": {"model_names": ["m"]}, "loadgen": {"concurrency": 4}},
        "was_cancelled": False,
        "error_summary": [],
        "end_time": "2026-10-01T12:00:00.5",
    }
    vllm = {
        "date": "20261001-120000",
        "backend": "vllm",
        "model_id": "m",
        "num_prompts": 41,
        "completed": 40,
        "request_rate": "inf",
        "max_concurrency": 4,
        "total_input_tokens": 4000,
        "median_e2el_ms": 850.0,
        "std_e2el_ms": 3.0,
        "request_throughput": 5.0,
    }
    report = {
        "version": "0.2.1",
        "run": {"uid": "x", "time": {"duration": "PT1M2.5S", "end": "2026-10-01T12:00:00Z"}},
        "scenario": {"load": {"standardized": {"concurrency": ".inf", "rate_qps": 3}}},
        "results": {
            "request_performance": {
                "aggregate": {
                    "requests": {"total": 40},
                    "latency": {"request_latency": {"units": "ms", "mean": 900.0, "p50": 850.0}},
                }
            }
        },
    }
    (tmp_path / "a.json").write_text(json.dumps(aiperf))
    (tmp_path / "v.json").write_text(json.dumps(vllm))
    (tmp_path / "l.yaml").write_text(yaml.safe_dump(report))
    a, v, l = (read(tmp_path / name) for name in ("a.json", "v.json", "l.yaml"))  # noqa: E741
    assert [one.latencies["latency"]["p50"] for one in (a, v, l)] == [0.85] * 3
    assert (a.model, a.concurrency, a.requests) == ("m", 4, 40)
    assert a.latencies["tpot"] == {"mean": 0.012}
    assert (v.failures, v.input_tokens, v.request_rate, v.engine) == (1, 100, None, "vllm")
    assert (l.duration_s, l.concurrency, l.request_rate, l.requests) == (62.5, None, 3, 40)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting"),
        ("[1]", "is none of the formats llm-d, aiperf, vllm-bench"),
        ('{"model_id": "m", "completed": "many"}', "looks like vllm-bench's format, but not whole"),
        ('{"scenario": 1, "results": 2}', "looks like llm-d's format, but not whole"),
        ('{"request_latency": {"unit": "days"}}', "looks like aiperf's format, but not whole"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused_by_name(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StoreError, match=r"other\.json") as raised:
        read(path)
    assert message in str(raised.value)
