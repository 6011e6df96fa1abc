"""Calibration: what an engine has to measure of a model before it can run it in fp8."""

from __future__ import annotations

from workloads.base import TOKENS
from workloads.data.datasets import DatasetParameters
from workloads.registry import WorkloadSpec
from workloads.settings import setting


class CalibrationParameters(DatasetParameters):
    """The measuring pass before fp8 on Gaudi; plans add such jobs by themselves."""

    prompts: int = setting(
        32,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        description="How many prompts of the dataset the model is measured on.",
    )
    output_tokens: int = setting(
        32,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        description="How many tokens after each prompt.",
    )


SPEC = WorkloadSpec(
    name="fp8-calibration",
    function="workloads.calibration:run",
    parameters=CalibrationParameters,
    summary="Largest values of every layer, which fp8 on Gaudi starts from.",
    ability="calibrate",
    tasks=("causal-lm",),
    throughput=TOKENS,
    implied=True,
)
