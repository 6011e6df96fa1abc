"""Fine-tuning, by a method and with techniques."""

from __future__ import annotations

from workloads.finetuning_parameters import FinetuningParameters
from workloads.finetuning_rules import refuse
from workloads.metrics import SAMPLES
from workloads.workloads.base import WorkloadSpec

SPEC = WorkloadSpec(
    name="finetuning",
    function="workloads.finetuning:run",
    parameters=FinetuningParameters,
    summary="Fine-tuning of a causal language model by method and technique: samples/s, loss.",
    ability="train",
    tasks=("causal-lm",),
    throughput=SAMPLES,
    refuse=refuse,
)
