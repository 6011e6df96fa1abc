"""Measurements of a model before jobs in a precision: for fp8, added by plans
(``EngineSpec.calibrations``), and for static int8 of ONNX graphs, named in grids."""

from __future__ import annotations

from workloads.base import (
    SAMPLES,
    TOKENS,
    JobContext,
    JobDescription,
    Refusal,
    Request,
    Result,
    Workload,
)
from workloads.data.datasets import DatasetParameters
from workloads.engines import engine_function
from workloads.registry import WorkloadSpec
from workloads.settings import amount, setting


class Fp8CalibrationParameters(DatasetParameters):
    """The measuring pass before fp8 on Gaudi; plans add such jobs by themselves."""

    prompts: int = amount(
        32,
        always_in_id=True,
        description="How many prompts of the dataset the model is measured on.",
    )
    output_tokens: int = amount(
        32, always_in_id=True, description="How many tokens after each prompt."
    )


FP8_CALIBRATION = WorkloadSpec(
    name="fp8-calibration",
    function="workloads.engines.calibration:run",
    parameters=Fp8CalibrationParameters,
    summary="Largest values of every layer, which fp8 on Gaudi starts from.",
    ability="calibrate",
    tasks=("causal-lm",),
    throughput=TOKENS,
    implied=True,
)


class OnnxCalibrationParameters(DatasetParameters):
    """The measuring pass of a graph over texts, before static int8."""

    save_calibration: str = setting(
        "activations",
        role="work",
        produces="calibration",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name under which the ranges are kept, for `calibration: NAME`.",
    )
    prompts: int = amount(
        32,
        le=10000,
        description="How many prompts of the dataset the graph reads; an encoder, how many texts.",
    )
    output_tokens: int = amount(
        8, le=4096, description="How many tokens after each prompt; an encoder writes none."
    )


def _refuse_onnx_calibration(job: JobDescription) -> tuple[Refusal, ...]:
    found = []
    if job.cards > 1:
        found.append(
            Refusal(setting="cards", reason="one card measures a graph", hint="write cards: 1")
        )
    if job.batch_size != 1:
        found.append(
            Refusal(
                setting="batch_size",
                reason="the graph reads one prompt at a time, without padding",
                hint="write batch_size: 1, or leave it out",
            )
        )
    return tuple(found)


ONNX_CALIBRATION = WorkloadSpec(
    name="onnx-calibration",
    function="workloads.engines.onnxruntime.calibration:run",
    parameters=OnnxCalibrationParameters,
    summary="Ranges of a graph's activations on texts, which static int8 in ONNX starts from.",
    ability="calibrate-activations",
    tasks=("causal-lm", "masked-lm"),
    throughput=SAMPLES,
    refuse=_refuse_onnx_calibration,
)


def run(request: Request, context: JobContext) -> Result:
    """Calibrate; see ``workloads.base.Workload``."""
    calibrate: Workload = engine_function(request.engine, "calibrate", context.device.name)
    return calibrate(request, context)


SPECS = (FP8_CALIBRATION, ONNX_CALIBRATION)
