"""Cells whose true figures are known: tokens/s saturate with the batch."""

from __future__ import annotations

from itertools import product

from schedule_cases import job

from orchestrator.core.job import Job

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SPEED = {"tiny": 1.0, "m1": 1.0, "m2": 0.5, "fp32": 1.0, "bf16": 1.9, "int8": 1.4}


def cells(*models: str) -> list[Job]:
    """Three precisions at eight batch sizes, of each model."""
    return [
        job(model=model, precision=precision, batch_size=batch)
        for model, precision, batch in product(models, ("fp32", "bf16", "int8"), BATCHES)
    ]


def throughput(of: Job) -> float:
    size = float(of.batch_size)
    return 100 * SPEED[of.precision] * SPEED[of.model] * size / (1 + size / 20) * of.cards**0.9


def figures(of: Job) -> dict[str, float]:
    rate = throughput(of)
    return {"throughput": rate, "latency_p50_s": float(of.batch_size) / rate}
