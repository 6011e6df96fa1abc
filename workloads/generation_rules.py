"""Rules of text generation: which jobs make sense, and which run on a device. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.attention_packages import PACKAGES
from workloads.generation.rules import batching_refusals
from workloads.parallel.tensor_rules import generation_refusals
from workloads.refusal import Asked, Refusal


def refuse(asked: Asked) -> tuple[Refusal, ...]:
    """All that speaks against a job, beside its engine and its model."""
    return (*generation_refusals(asked), *batching_refusals(asked), *_attention_refusals(asked))


def _attention_refusals(asked: Asked) -> Iterator[Refusal]:
    """Attention by a package that has no kernels for the device."""
    attention = str(asked.parameters.get("attention", ""))
    if attention in PACKAGES and not asked.on.can(attention):
        yield Refusal(
            setting="attention",
            reason=f"{attention} has no {asked.device} kernels",
            hint="write attention: sdpa",
            unsupported=True,
        )
