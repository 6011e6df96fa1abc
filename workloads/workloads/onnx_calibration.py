"""Calibration of a graph: the range of every activation, which static int8 starts from."""

from __future__ import annotations

from workloads.base import SAMPLES, JobDescription, Refusal
from workloads.data.datasets import DatasetParameters
from workloads.registry import WorkloadSpec
from workloads.settings import setting


class OnnxCalibrationParameters(DatasetParameters):
    """The measuring pass of a graph over texts, before static int8."""

    save_calibration: str = setting(
        "activations",
        role="work",
        produces="calibration",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name under which the ranges are kept, for `calibration: NAME`.",
    )
    prompts: int = setting(
        32,
        role="work",
        length=True,
        ge=1,
        le=10000,
        description="How many prompts of the dataset the graph reads; an encoder, how many texts.",
    )
    output_tokens: int = setting(
        8,
        role="work",
        length=True,
        ge=1,
        le=4096,
        description="How many tokens after each prompt; an encoder writes none.",
    )


def refuse(asked: JobDescription) -> tuple[Refusal, ...]:
    """Shapes of a pass that is not one prompt on one card."""
    found = []
    if asked.cards > 1:
        found.append(
            Refusal(setting="cards", reason="one card measures a graph", hint="write cards: 1")
        )
    if asked.batch_size != 1:
        found.append(
            Refusal(
                setting="batch_size",
                reason="the graph reads one prompt at a time, without padding",
                hint="write batch_size: 1, or leave it out",
            )
        )
    return tuple(found)


SPEC = WorkloadSpec(
    name="onnx-calibration",
    function="workloads.onnx_graphs.calibration:run",
    parameters=OnnxCalibrationParameters,
    summary="Ranges of a graph's activations on texts, which static int8 in ONNX starts from.",
    ability="calibrate-activations",
    tasks=("causal-lm", "masked-lm"),
    throughput=SAMPLES,
    refuse=refuse,
)
