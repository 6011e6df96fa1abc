"""Sequence-to-sequence models: an encoder reads one text, a decoder writes another."""

from __future__ import annotations

from workloads.tasks.base import TaskSpec

SPEC = TaskSpec(
    name="seq2seq-lm",
    title="a sequence-to-sequence model",
    encoder_decoder=True,
    model_types=frozenset({"bart", "led", "longt5", "marian", "mbart", "mt5", "pegasus", "t5"}),
)
