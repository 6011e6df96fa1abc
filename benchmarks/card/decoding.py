"""Rows of the engine graph by the product's measuring code, in one process without Ray.

    python -m benchmarks.card.decoding MODEL OUT [SECONDS] [DEVICE] [PRECISIONS]

MODEL is a checkpoint's directory, OUT a folder for ``decoding_rows.jsonl``. Each precision runs at
four batch sizes (128 tokens in, 128 out), and its logits are compared with stock transformers' by
the workload ``verification``. Cells that would begin after SECONDS (default 600) are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.card.rows import Rows
from benchmarks.contenders.alone import Alone, request
from workloads.base import MeasureSettings, Result, WorkloadError
from workloads.devices import device_for

BATCH_SIZES = (1, 8, 32, 128)
_MEASURE = MeasureSettings(
    warmup=1, min_repeats=3, max_repeats=4, time_limit_s=8, relative_half_width=0.02
)


def main(
    model: str,
    out: str,
    seconds: str = "600",
    device: str = "cuda",
    precisions: str = "bf16,int4,fp8,int8,fp32,fp16",
) -> None:
    """All precisions, the fastest and the plainest first."""
    card = device_for(device)
    with Rows(card, Path(out) / "decoding_rows.jsonl") as rows:
        for precision in precisions.split(","):
            alone = Alone(card)
            for batch_size in BATCH_SIZES:
                if rows.elapsed_s > float(seconds):
                    return
                cell = {"precision": precision, "batch_size": batch_size}
                try:
                    rows.write(**cell, **_rates(alone, model, **cell))
                except (WorkloadError, RuntimeError) as error:
                    rows.write(**cell, failed=f"{type(error).__name__}: {error}"[:300])
            del alone
            torch._dynamo.reset()
            card.release_memory()
            if rows.elapsed_s < float(seconds):
                rows.write(precision=precision, verification=_distance(card, model, precision))
                card.release_memory()


def _rates(alone: Alone, model: str, precision: str, batch_size: int) -> dict[str, Any]:
    """One job of text generation, as a worker would run it."""
    job = request(
        "text-generation",
        model=model,
        dataset="advertisegen-synthetic",
        precision=precision,
        batch_size=batch_size,
        engine="graph",
        residency_key=precision,
        measure=_MEASURE,
        parameters={
            "output_tokens": 128,
            "input_tokens": 128,
            "ignore_eos": True,
            "prompts": batch_size,
            "keep_texts": 0,
        },
    )
    result = alone.run(job)
    samples = [sample for sample in result.samples if not sample.warmup]
    step_s = median(_step_s(result))
    return {
        "tokens_per_s": round(median(s.output_tokens / s.wall_s for s in samples), 1),
        "decode_tokens_per_s": round(batch_size / step_s, 1),
        "ttft_ms": round(1e3 * median(s.ttft_s or 0.0 for s in samples), 2),
        "step_ms": round(1e3 * step_s, 3),
        "load_s": round(result.load_s, 2),
        "weight_gb": round((result.weight_bytes or 0) / 1e9, 3),
        "peak_gb": round((result.peak_device_memory_bytes or 0) / 1e9, 2),
        "stop": result.stop_reason,
    }


def _step_s(result: Result) -> list[float]:
    """Seconds of a decoding step, as each prompt met them."""
    return [
        (item.latency_s - (item.ttft_s or 0.0)) / (item.output_tokens - 1) for item in result.items
    ]


def _distance(card: Any, model: str, precision: str) -> dict[str, Any]:
    """Compare the logits with those of stock transformers in the same precision."""
    job = request(
        "verification",
        model=model,
        dataset="advertisegen-synthetic",
        precision=precision,
        batch_size=4,
        engine="graph",
        residency_key=f"verification {precision}",
        parameters={"prompts": 4, "output_tokens": 32},
    )
    try:
        result = Alone(card).run(job)
    except (WorkloadError, RuntimeError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {"agrees": dict(result.details).get("agrees")} | dict(result.metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
