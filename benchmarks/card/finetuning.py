"""LoRA of one model on one card, way by way, by the product's measuring code, without Ray.

    python -m benchmarks.card.finetuning MODEL OUT [SECONDS] [DEVICE]

MODEL is a checkpoint's directory (``python -m benchmarks.card.random_chatglm3``), OUT a folder for
``finetuning.jsonl``. A row has the operations of a second (TFLOP/s), of real tokens; over the peak
of the card in bf16 (989 for an H100) they are its share, of which 45 % are the goal with packed
samples. A way that fails has the reason. Ways that would begin after SECONDS (default 500) are left
out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.card.rows import Rows
from benchmarks.contenders.alone import Alone, request
from workloads.base import MeasureSettings, WorkloadError
from workloads.devices import device_for

_ONE_ROW = {"padding": "packing", "packed_attention": "apart"}
_COMPILED = {"torch_compile": True}
_CHUNKED = {"logits": "chunked"}
#: Likely the best first, since time on a card is short.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "one row of one length, compiled": _ONE_ROW
    | _COMPILED
    | _CHUNKED
    | {"packed_length": "longest"},
    "one row, layers compiled": _ONE_ROW | _COMPILED | _CHUNKED | {"compile_scope": "layers"},
    "one row": _ONE_ROW | _CHUNKED,
    "fixed length, compiled": _COMPILED | {"padding": "fixed"},
    "one row, Liger": _ONE_ROW | {"fused_kernels": "liger"},
    "packed, masked": {"padding": "packing"},
    "dynamic padding": {},
}
_MEASURE = MeasureSettings(warmup=3, min_repeats=1, max_repeats=1, time_limit_s=120.0)
_STEPS, _MAX_LENGTH = 6, 512


def main(
    model: str,
    out: str,
    seconds: str = "500",
    device: str = "cuda",
    batches: str = "16,32",
    ways: str = "",
) -> None:
    """All ways at all batch sizes, and of LoRA's neighbour QLoRA the first."""
    card = device_for(device)
    chosen = {name: WAYS[name] for name in ways.split(";")} if ways else WAYS
    with Rows(card, Path(out) / "finetuning.jsonl") as rows:
        cells = [
            (name, way, "lora", int(batch))
            for batch in batches.split(",")
            for name, way in chosen.items()
        ]
        name, way = next(iter(chosen.items()))
        cells.append((name, way, "qlora", int(batches.split(",")[0])))
        for name, way, method, batch in cells:
            if rows.elapsed_s > float(seconds):
                return
            told = {"way": name, "method": method, "batch": batch}
            card.release_memory()
            card.reset_peak_memory()
            try:
                rows.write(**told, **_figures(model, card, way, method, batch))
            except (WorkloadError, RuntimeError) as error:
                rows.write(**told, failed=f"{type(error).__name__}: {error}"[:300])


def _figures(
    model: str, card: Any, way: Mapping[str, Any], method: str, batch: int
) -> dict[str, Any]:
    """One job of fine-tuning, as a worker would run it."""
    asked = request(
        "finetuning",
        model=model,
        dataset="advertisegen-synthetic",
        precision="bf16",
        batch_size=batch,
        measure=_MEASURE,
        residency_key=method,
        parameters={
            "method": method,
            "steps": _STEPS,
            "samples": batch * (_STEPS + _MEASURE.warmup),
            "max_length": _MAX_LENGTH,
            **way,
        },
    )
    result = Alone(card).run(asked)
    timed = [step for step in result.samples if not step.warmup]
    tokens_per_s = median(step.input_tokens / step.wall_s for step in timed)
    flops = result.train_flops_per_token
    return {
        "samples_per_s": round(median(step.items / step.wall_s for step in timed), 2),
        "tokens_per_s": round(tokens_per_s, 1),
        "tflop_per_s": None if flops is None else round(flops * tokens_per_s / 1e12, 2),
        "step_s": [round(step.wall_s, 4) for step in timed],
        "losses": [step.loss for step in timed],
        "compile_s": round(result.compile_s or 0.0, 1),
        "peak_gb": round((result.peak_device_memory_bytes or 0) / 1e9, 2),
        "details": dict(result.details),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
