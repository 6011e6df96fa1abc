"""Sequence-to-sequence models: an encoder reads one text, a decoder writes another."""

from __future__ import annotations

from workloads.generation.encoder_figures import METRICS as ENCODER_METRICS
from workloads.models import protection
from workloads.parameters import WorkloadParameters
from workloads.seq2seq_rules import refuse as seq2seq_refusals
from workloads.seq2seq_settings import Seq2SeqParameters
from workloads.tasks.base import TaskSpec
from workloads.training_metrics import LOSSES

SPEC = TaskSpec(
    name="seq2seq-lm",
    title="a sequence-to-sequence model",
    encoder_decoder=True,
    model_types=frozenset({"bart", "led", "longt5", "marian", "mbart", "mt5", "pegasus", "t5"}),
    functions={
        "load": "workloads.models.loading:load_seq2seq_model",
        "encode": "workloads.training.pairs:encode",
        "collate": "workloads.training.pairs:collate",
        "loss": "workloads.training.losses:target_loss",
        "aligned": "workloads.training.losses:aligned_targets",
        "generator": "workloads.generation.encoder_decoder:generator",
        "flops": "workloads.training.pairs:flops",
    },
    metrics=(*LOSSES, *ENCODER_METRICS, *protection.METRICS),
    settings=frozenset(Seq2SeqParameters.model_fields.keys() - WorkloadParameters.model_fields),
    refuse=seq2seq_refusals,
    forward={"use_cache": False},
)
