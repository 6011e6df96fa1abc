"""Fine-tuning, by a method and with techniques.

Its parameters are put together from the method's and those of ``workloads.techniques``, so the
settings of a technique that is found there are settings of grids at once.
"""

from __future__ import annotations

from workloads.base import SAMPLES
from workloads.finetuning_method import MethodParameters
from workloads.finetuning_rules import refuse
from workloads.registry import WorkloadSpec
from workloads.seq2seq_settings import Seq2SeqParameters
from workloads.techniques import technique_metrics, technique_notes, with_techniques

TASKS = ("causal-lm", "seq2seq-lm")


class _Parameters(Seq2SeqParameters, MethodParameters):
    """Fine-tuning of a language model, by a method and with techniques."""


FinetuningParameters = with_techniques("FinetuningParameters", _Parameters, TASKS)

SPEC = WorkloadSpec(
    name="finetuning",
    function="workloads.finetuning:run",
    also_called=("training", "train", "sft", "lora", "qlora"),
    parameters=FinetuningParameters,
    summary="Fine-tuning of a language model by method and technique: samples/s, loss.",
    ability="train",
    tasks=TASKS,
    throughput=SAMPLES,
    metrics=technique_metrics(TASKS),
    refuse=refuse,
    notes=technique_notes,
)
