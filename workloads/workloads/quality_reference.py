"""Reference of quality: texts of the plain path, which others are held against."""

from __future__ import annotations

from workloads.base import TOKENS
from workloads.data.datasets import DatasetParameters
from workloads.registry import WorkloadSpec
from workloads.settings import setting
from workloads.training.pairs import SourceParameters


class QualityReferenceParameters(SourceParameters, DatasetParameters):
    """The plain path's texts and probabilities; plans add such jobs by themselves."""

    prompts: int = setting(
        8,
        role="work",
        length=True,
        ge=1,
        le=1000,
        description="How many prompts of the dataset are continued, from the first on.",
    )
    output_tokens: int = setting(
        32,
        role="work",
        length=True,
        ge=1,
        le=4096,
        description="How many tokens after each prompt.",
    )
    adapter: str | None = setting(
        None,
        role="work",
        loads=True,
        consumes="adapter",
        min_length=1,
        description="A trained adapter to put on the model.",
    )


SPEC = WorkloadSpec(
    name="quality-reference",
    function="workloads.quality_reference:run",
    parameters=QualityReferenceParameters,
    summary="Texts and probabilities of the plain path, which `quality: true` compares with.",
    ability="generate",
    tasks=("causal-lm", "seq2seq-lm"),
    throughput=TOKENS,
    implied=True,
)
