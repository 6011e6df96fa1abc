"""A workload run by hand: what a warm worker gives it, without a worker around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from workloads import registry
from workloads.base import JobContext, MeasureSettings, Request, Result, Sample
from workloads.bench.collective import OneCard
from workloads.devices import device_for
from workloads.devices.base import Device

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


class Alone:
    """One card, of a CPU unless it is given, and the models that it has loaded."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device_for("cpu") if device is None else device
        self._loaded: dict[str, Any] = {}

    def run(self, asked: Request) -> Result:
        """Run the workload; what is resident is not loaded again."""
        return registry.load(asked.workload)(asked, self._context())

    def load(self, asked: Request) -> None:
        """Do the least that loads the model and warms it up."""
        least = dict(asked.parameters) | {"prompts": 1, "output_tokens": 2}
        self.run(replace(asked, parameters=least, batch_size=1))

    def _resident(self, key: str, loader: Callable[[], Any]) -> Any:
        if key not in self._loaded:
            self._loaded[key] = loader()
        return self._loaded[key]

    def _context(self) -> JobContext:
        return JobContext(
            device=self._device,
            rank=0,
            world_size=1,
            collective=OneCard(),
            enter_phase=lambda phase: None,
            resident=self._resident,
            clock=time.perf_counter,
            cpu_clock=time.process_time,
        )
