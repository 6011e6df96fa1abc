"""vLLM with its plugin vllm-gaudi, in this very process, on the card that this process holds.

Written after vLLM 0.26.0 and vllm-gaudi 0.26.0; what is used of them is recorded in
``tests/workloads/vllm_gaudi_interface.json``. The plugin computes on *buckets*: numbers of prompts,
tokens and cache blocks that it rounds every step up to. It compiles all of them when the model is
loaded, which takes minutes to an hour and is a phase of its own here.
It also replaces what it does not compute in, so the data type is read back (``vllm_engine``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Iterator
from typing import Any

from workloads import base
from workloads.base import Request
from workloads.devices.base import Device
from workloads.engines.vllm_gaudi import SPEC
from workloads.generation import vllm_engine
from workloads.generation.vllm_engine import VllmEngine


def load(request: Request, device: Device) -> VllmEngine:
    """Load ``request.model`` in ``request.precision``; see ``vllm_engine.load``."""
    mode = SPEC.mode(device.name, request.settings)
    with _warm_up_told() as took:
        engine = vllm_engine.load(request, device, enforce_eager=mode == "eager")
    config = engine.llm.llm_engine.vllm_config
    return dataclasses.replace(
        engine,
        details={
            **engine.details,
            "hpu_mode": mode,
            "kv_block_tokens": str(config.cache_config.block_size),
            **_buckets(),
            "engine_warmup_s": f"{sum(took):.1f}",
        },
    )


@contextlib.contextmanager
def _warm_up_told() -> Iterator[list[float]]:
    """Name the phase while the plugin compiles its buckets; the seconds it took, at the end."""
    worker: Any = importlib.import_module("vllm_gaudi.v1.worker.hpu_worker").HPUWorker
    warm_up = worker.compile_or_warm_up_model
    took: list[float] = []

    def told(self: Any) -> Any:
        base.report_phase("compile")
        began = time.perf_counter()
        try:
            return warm_up(self)
        finally:
            took.append(time.perf_counter() - began)
            base.report_phase("load")

    worker.compile_or_warm_up_model = told
    try:
        yield took
    finally:
        worker.compile_or_warm_up_model = warm_up


def _buckets() -> dict[str, str]:
    """Numbers of buckets, and the largest: prompts, tokens, cache blocks."""
    common = importlib.import_module("vllm_gaudi.extension.bucketing.common")
    manager = common.HPUBucketingManager._active_instance
    if manager is None:
        return {"buckets": "none"}
    parts = {"prompt": manager.prompt_buckets, "decode": manager.decode_buckets}
    told = [f"{len(found)} {kind} up to {max(found)}" for kind, found in parts.items() if found]
    return {"buckets": ", ".join(told) or "none: warm-up was left out"}
