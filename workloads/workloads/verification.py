"""Verification: whether an engine generates what stock transformers would."""

from __future__ import annotations

from typing import Literal

from workloads.base import TOKENS
from workloads.data.datasets import DatasetParameters
from workloads.generation_rules import refuse
from workloads.registry import WorkloadSpec
from workloads.settings import ADAPTER, setting


class VerificationParameters(DatasetParameters):
    """An engine's greedy tokens and logits against those of stock transformers."""

    prompts: int = setting(
        4,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        le=1000,
        description="How many prompts of the dataset are compared.",
    )
    output_tokens: int = setting(
        16,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        le=4096,
        description="How many tokens after each prompt.",
    )
    attention: Literal["eager", "sdpa", "flash_attention_2"] = setting(
        "sdpa",
        role="choice",
        loads=True,
        always_in_id=True,
        description="Attention implementation of the engine, as in text-generation.",
    )
    adapter: str | None = ADAPTER


SPEC = WorkloadSpec(
    name="verification",
    function="workloads.verification:run",
    parameters=VerificationParameters,
    summary="An engine's greedy tokens and logits against those of stock transformers.",
    ability="generate",
    tasks=("causal-lm",),
    throughput=TOKENS,
    refuse=refuse,
    moved={"hpu_mode": None},
)
