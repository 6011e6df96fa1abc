"""One job by hand: a workload called in this process, as a warm worker calls it.

No worker, cluster or rows: for scripts (``nightgrid repro`` writes one), debuggers and benchmarks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from workloads import registry
from workloads.base import JobContext, Request, Result, Sample
from workloads.bench.collective import OneCard
from workloads.devices import device_for
from workloads.devices.base import Device

#: Every job starts from it.
SEED = 0


class Alone:
    """One card, of a CPU unless it is given, and the models that it has loaded."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device_for("cpu") if device is None else device
        self._loaded: dict[str, Any] = {}

    def run(self, request: Request) -> Result:
        """Run the workload; what is resident is not loaded again."""
        self._device.seed(SEED)
        self._device.configure()
        context = JobContext(
            device=self._device,
            rank=0,
            world_size=1,
            collective=OneCard(),
            enter_phase=lambda phase: None,
            resident=self._resident,
            clock=time.perf_counter,
            cpu_clock=time.process_time,
        )
        return registry.load(request.workload)(request, context)

    def _resident(self, key: str, loader: Callable[[], Any]) -> Any:
        if key not in self._loaded:
            self._loaded[key] = loader()
        self._device.seed(SEED)
        return self._loaded[key]


def throughput(samples: Iterable[Sample], counts: str) -> float:
    """Work a second of the timed, complete repeats: the mean of their rates, or in training, whose
    repeats are steps of unequal work, all work over all time.

    ``counts`` is the field of a sample that is work (``base.Throughput``); ValueError without a
    complete repeat.
    """
    timed = [sample for sample in samples if sample.complete and not sample.warmup]
    repeats: dict[int, list[Sample]] = {}
    for sample in timed:
        training = sample.loss is not None
        repeats.setdefault(0 if training else sample.repeat, []).append(sample)
    if not repeats:
        raise ValueError("no repeat was completed in time")
    rates = [
        sum(getattr(sample, counts) for sample in repeat)
        / math.fsum(sample.wall_s for sample in repeat)
        for repeat in repeats.values()
    ]
    return math.fsum(rates) / len(rates)
