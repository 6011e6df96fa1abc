"""Fine-tuning, by a method and with techniques.

Its parameters are put together from the method's and those of ``workloads.techniques``, so the
settings of a technique that is found there are settings of grids at once.
"""

from __future__ import annotations

from typing import Any

from pydantic import create_model

from workloads.finetuning_method import MethodParameters
from workloads.finetuning_rules import refuse
from workloads.metrics import SAMPLES
from workloads.seq2seq_settings import Seq2SeqParameters
from workloads.techniques import all_techniques
from workloads.workloads.base import WorkloadSpec

_TECHNIQUES: dict[str, Any] = {
    name: (info.annotation, info)
    for technique in all_techniques()
    for name, info in technique.model_fields.items()
}


class _Parameters(Seq2SeqParameters, MethodParameters):
    """The method's, and those of sequence-to-sequence models."""


FinetuningParameters: type[MethodParameters] = create_model(
    "FinetuningParameters",
    __base__=_Parameters,
    __doc__="Fine-tuning of a language model, by a method and with techniques.",
    **_TECHNIQUES,
)

SPEC = WorkloadSpec(
    name="finetuning",
    function="workloads.finetuning:run",
    parameters=FinetuningParameters,
    summary="Fine-tuning of a language model by method and technique: samples/s, loss.",
    ability="train",
    tasks=("causal-lm", "seq2seq-lm"),
    throughput=SAMPLES,
    refuse=refuse,
)
