"""A workload run by hand: what a warm worker gives it, without a worker around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import workloads.alone
from workloads import registry
from workloads.base import MeasureSettings, Request, Sample

ONCE = MeasureSettings(warmup=0, min_repeats=1, max_repeats=1, time_limit_s=3600.0)
#: Training: the first optimizer step is the warm-up, as in a job, and takes the memory of the
#: longest. A peer keeps the memory of its turn before; ours gives it back after each job.
WARMED = replace(ONCE, warmup=1)


def request(workload: str, *, parameters: dict[str, Any], **fields: Any) -> Request:
    """A job of this workload in fp32, measured once."""
    usual: dict[str, Any] = {
        "workload": workload,
        "precision": "fp32",
        "engine": "transformers",
        "residency_key": "alone",
        "measure": ONCE,
    }
    usual |= fields
    own, engines = registry.find_workload(workload).split(parameters, usual["engine"])
    return Request(parameters=own, settings=engines, **usual)


def timed(steps: Sequence[Sample]) -> dict[str, float]:
    """Work and time of all steps but the first, as ``timed_trainer`` counts them."""
    rest = steps[1:]
    return {
        "work": sum(step.items for step in rest),
        "wall_s": sum(step.wall_s for step in rest),
        "cpu_s": sum(step.cpu_s for step in rest),
    }


class Alone(workloads.alone.Alone):
    """One card, and the models that it has loaded."""

    def load(self, request: Request) -> None:
        """Do the least that loads the model and warms it up."""
        least = dict(request.parameters) | {"prompts": 1, "output_tokens": 2}
        self.run(replace(request, parameters=least, batch_size=1))
