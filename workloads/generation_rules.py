"""Rules of text generation: which jobs make sense, and which run on a device. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator

from workloads import attention_packages
from workloads.base import JobDescription, Refusal
from workloads.generation.rules import batching_refusals
from workloads.models.catalog import known_config, vocabulary_size
from workloads.models.rules import quantised_refusals
from workloads.training.parallel.layout import generation_refusals


def refuse(asked: JobDescription) -> tuple[Refusal, ...]:
    """All that speaks against a job, beside its engine and its model."""
    return (
        *generation_refusals(asked),
        *batching_refusals(asked),
        *attention_packages.refusals(asked),
        *quantised_refusals(asked),
        *_quality_refusals(asked),
    )


def _quality_refusals(asked: JobDescription) -> Iterator[Refusal]:
    """A reference that nothing is compared with, or whose tokens are others."""
    of = asked.parameters.get("quality_of")
    if of is None:
        return
    if not asked.parameters.get("quality"):
        yield Refusal(
            setting="quality_of",
            reason="without `quality` nothing is compared",
            hint="write quality: true, or leave quality_of out",
        )
    sizes = [vocabulary_size(known_config(name) or {}) for name in (str(of), asked.model)]
    if None not in sizes and sizes[0] != sizes[1]:
        yield Refusal(
            setting="quality_of",
            reason=f"{of} has a vocabulary of {sizes[0]:,} tokens and {asked.model} one of "
            f"{sizes[1]:,}, so their texts cannot be compared",
            hint="name a model with the same tokenizer",
        )
