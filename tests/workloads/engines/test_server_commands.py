"""Command lines of other libraries' servers; ``transformers serve`` also runs, where it can."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from generation_cases import described, request

from workloads.base import DataMissing
from workloads.devices import device_for
from workloads.engines import endpoint, sglang, vllm
from workloads.engines import transformers as stock
from workloads.engines.base import ServerCommand, ServerPlace
from workloads.registry import find_workload
from workloads.rules import refusals
from workloads.serving import servers

PLACE = ServerPlace(host="127.0.0.1", port=8123, key="the-key", device="cuda", cards=2, threads=3)
SETTINGS: dict[str, Any] = {
    "tensor_parallel": 2,
    "max_sequences": 64,
    "max_model_len": 256,
    "max_batched_tokens": 2048,
    "chunked_prefill": False,
    "prefix_caching": True,
    "kv_cache_dtype": "fp8_e5m2",
    "speculative_tokens": 3,
}


def options(command: ServerCommand) -> dict[str, str]:
    """Options of a command line and their values; "" for switches."""
    pairs = (part[2:].partition("=") for part in command.arguments if part.startswith("--"))
    return {name: value for name, _, value in pairs}


def job(engine: str, **settings: Any) -> Any:
    return request("", workload="serving", engine=engine, precision="bf16", **settings)


@pytest.mark.slow
def test_vllm_gets_its_settings_and_its_key_by_a_variable() -> None:
    command = vllm.serve(job("vllm", **SETTINGS), PLACE)
    found = options(command)
    assert found["port"] == "8123" and found["dtype"] == "bfloat16"
    assert found["tensor-parallel-size"] == "2" and found["max-num-seqs"] == "64"
    assert found["max-num-batched-tokens"] == "2048" and found["kv-cache-dtype"] == "fp8_e5m2"
    assert json.loads(found["speculative-config"])["num_speculative_tokens"] == 3
    assert {"enable-prefix-caching", "no-enable-chunked-prefill"} <= found.keys()
    assert "device-ids" not in found  # CUDA_VISIBLE_DEVICES alone says which cards
    assert command.environment["VLLM_API_KEY"] == "the-key"
    assert "the-key" not in " ".join(command.arguments)
    assert command.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] is None


def test_sglang_gets_its_settings() -> None:
    found = options(sglang.serve(job("sglang", **SETTINGS), PLACE))
    assert found["tp-size"] == "2" and found["max-running-requests"] == "64"
    assert found["chunked-prefill-size"] == "-1" and found["speculative-algorithm"] == "NGRAM"
    assert "disable-radix-cache" not in found
    plain = options(sglang.serve(job("sglang"), PLACE))
    assert "disable-radix-cache" in plain and "tp-size" not in plain


def test_an_endpoint_has_its_key_from_a_file_and_no_setting_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret-of-the-endpoint\n")
    asked = job("endpoint", url="http://host:9/v1", key_file=str(file), served_model="m")
    command = endpoint.serve(asked, PLACE)
    assert (command.url, command.model) == ("http://host:9", "m") and not command.arguments
    assert command.key == "secret-of-the-endpoint"
    assert command.key not in repr(command) and command.key not in repr(asked)
    with pytest.raises(DataMissing, match="key_file"):
        endpoint.serve(job("endpoint", url="http://host", key_file=str(tmp_path / "none")), PLACE)


@pytest.mark.parametrize(
    ("engine", "settings", "setting"),
    [
        ("endpoint", {}, "url"),
        ("endpoint", {"url": "ftp://host"}, "url"),
        ("endpoint", {"url": "http://key:word@host"}, "url"),
        ("graph", {"tensor_parallel": 2}, "tensor_parallel"),
        ("transformers", {"max_sequences": 4, "precision": "bf16"}, "max_sequences"),
        ("transformers", {"precision": "int8"}, "precision"),
        ("vllm", {"draft_model": "a", "device": "cuda", "precision": "bf16"}, "draft_model"),
        ("vllm", {"tensor_parallel": 2, "device": "cuda", "precision": "bf16"}, None),
    ],
)
def test_what_a_server_cannot_do_is_refused(engine, settings, setting) -> None:
    load = {"concurrency": 1, "input_tokens": 6, "output_tokens": 4, "slo": "", "cards": 2}
    found = refusals(find_workload("serving"), described(engine=engine, **load | settings))
    assert setting in {refusal.setting for refusal in found} if setting else found == (), found


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("openai") is None, reason="`transformers serve` needs openai"
)
def test_transformers_serves_the_embedded_model_past_its_end() -> None:
    asked = job("transformers", server_batching=False)
    server = servers.start(stock.serve, asked, device_for("cpu"))
    try:
        command = server.command
        body = {"model": command.model, "prompt": "你好", "max_tokens": 12, "temperature": 0}
        answer = json.loads(
            server.ask("/v1/completions", {**body, **command.past_end}, timeout_s=60)
        )
        assert answer["usage"]["completion_tokens"] == 12
    finally:
        server.stop()
