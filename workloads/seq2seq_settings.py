"""Settings of sequence-to-sequence models: how a text becomes what the encoder reads.

Fine-tuning and text generation have them beside their own; with a model of another kind the plan
refuses them (``TaskSpec.settings``). Their values are those of transformers' own example script,
``run_summarization.py``: an article is cut at 1,024 tokens, its summary at 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.base import WorkloadParameters
from workloads.settings import setting

#: Most tokens of a source and of a target, unless told.
SOURCE_TOKENS, TARGET_TOKENS = 1024, 128


class SourceParameters(WorkloadParameters):
    """Settings of what the encoder reads."""

    source_prefix: str = setting(
        "",
        role="work",
        loads=True,
        description="Text before every source, such as `summarize: ` (the blank at its end "
        "counts), which T5's own checkpoints want. For sequence-to-sequence models.",
    )
    max_source_length: int | None = setting(
        None,
        role="work",
        loads=True,
        length=True,
        ge=2,
        description="Most tokens of a source; a longer one is cut at its end. For "
        f"sequence-to-sequence models. Left out: {SOURCE_TOKENS}.",
    )


class Seq2SeqParameters(SourceParameters):
    """Settings of pairs of texts that a model learns from."""

    max_target_length: int | None = setting(
        None,
        role="work",
        length=True,
        ge=2,
        description="Most tokens of a target (a summary); a longer one is cut at its end. For "
        f"sequence-to-sequence models. Left out: {TARGET_TOKENS}.",
    )


def source_length(parameters: Mapping[str, Any]) -> int:
    """Most tokens of a source."""
    return int(parameters.get("max_source_length") or SOURCE_TOKENS)


def target_length(parameters: Mapping[str, Any]) -> int:
    """Most tokens of a target."""
    return int(parameters.get("max_target_length") or TARGET_TOKENS)
