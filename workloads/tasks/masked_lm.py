"""Masked language models: tokens are predicted from those on both sides."""

from __future__ import annotations

from workloads.tasks.base import TaskSpec
from workloads.training_metrics import LOSSES

SPEC = TaskSpec(
    name="masked-lm",
    title="a masked language model",
    architectures=("ForMaskedLM", "ForPreTraining"),
    model_types=frozenset(
        {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet"}
        | {"modernbert", "roberta", "xlm-roberta"}
    ),
    functions={
        "load": "workloads.models.masked_lm:load_masked_model",
        "make": "workloads.models.masked_lm:make_masked_model",
        "encode": "workloads.training.chunks:encode",
        "arrange": "workloads.training.chunks:arrange",
        "draw": "workloads.training.chunks:draw",
        "collate": "workloads.training.chunks:collate",
        "loss": "workloads.training.losses:target_loss",
    },
    metrics=LOSSES,
)
