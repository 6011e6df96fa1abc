"""The measurement before jobs in fp8, which plans add (``EngineSpec.calibrations``)."""

from __future__ import annotations

from workloads.base import TOKENS, JobContext, Request, Result, Workload
from workloads.data.datasets import DatasetParameters
from workloads.engines import engine_function
from workloads.registry import WorkloadSpec
from workloads.settings import amount_in_id


class Fp8CalibrationParameters(DatasetParameters):
    """The measuring pass before fp8 on Gaudi; plans add such jobs by themselves."""

    prompts: int = amount_in_id(
        32, description="How many prompts of the dataset the model is measured on."
    )
    output_tokens: int = amount_in_id(32, description="How many tokens after each prompt.")


SPEC = WorkloadSpec(
    name="fp8-calibration",
    function="workloads.engines.calibration:run",
    parameters=Fp8CalibrationParameters,
    summary="Largest values of every layer, which fp8 on Gaudi starts from.",
    ability="calibrate",
    tasks=("causal-lm",),
    throughput=TOKENS,
    implied=True,
)


def run(request: Request, context: JobContext) -> Result:
    """Calibrate; see ``workloads.base.Workload``."""
    calibrate: Workload = engine_function(request.engine, "calibrate", context.device.name)
    return calibrate(request, context)
