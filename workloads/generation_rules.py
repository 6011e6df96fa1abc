"""Rules of text generation: which jobs make sense, and which run on a device. Pure, no torch."""

from __future__ import annotations

from workloads.generation.rules import batching_refusals
from workloads.parallel.tensor_rules import generation_refusals
from workloads.refusal import Asked, Refusal


def refuse(asked: Asked) -> tuple[Refusal, ...]:
    """All that speaks against a job, beside its engine and its model."""
    return (*generation_refusals(asked), *batching_refusals(asked))
