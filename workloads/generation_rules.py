"""Which jobs of text generation make sense, and which can run on a device: pure, without torch."""

from __future__ import annotations

from workloads.engines import engine_refusals
from workloads.generation.rules import batching_refusals
from workloads.parallel.tensor_rules import generation_refusals
from workloads.refusal import Asked, Refusal


def refuse_calibration(asked: Asked) -> tuple[Refusal, ...]:
    """All that speaks against measuring what a precision starts from."""
    return tuple(engine_refusals(asked, "calibrate"))


def refuse(asked: Asked) -> tuple[Refusal, ...]:
    """All that speaks against a job."""
    return (
        *engine_refusals(asked, "generate"),
        *generation_refusals(asked),
        *batching_refusals(asked),
    )
