"""Masked language models: tokens are predicted from those on both sides."""

from __future__ import annotations

from workloads.tasks.base import TaskSpec

SPEC = TaskSpec(
    name="masked-lm",
    title="a masked language model",
    architectures=("ForMaskedLM", "ForPreTraining"),
    model_types=frozenset(
        {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet"}
        | {"modernbert", "roberta", "xlm-roberta"}
    ),
)
