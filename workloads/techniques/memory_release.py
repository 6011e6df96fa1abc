"""Releasing memory between steps."""

from __future__ import annotations

import time
from typing import ClassVar

from pydantic import PrivateAttr

from workloads.settings import setting
from workloads.techniques.base import Technique, Training


class MemoryRelease(Technique):
    """Releasing memory between steps: order for time.

    Allocators keep what a step has freed, for the next one. Where steps differ in length, blocks of
    one step do not fit the next, and the kept memory grows until a card is full of holes. Giving it
    all back after a step costs the time of asking for it again; where memory is tight that can be
    the difference between running and not.
    """

    name: ClassVar[str] = "memory-release"
    title: ClassVar[str] = "memory release between steps"
    order: ClassVar[int] = 160

    release_memory_every: int = setting(
        0,
        role="choice",
        always_in_id=True,
        ge=0,
        description="Give memory that is not in use back to the device (on CPUs to the system) "
        "after every so many optimizer steps, within their time; 0: never.",
    )

    _seconds: list[float] = PrivateAttr(default_factory=list)

    def after_step(self, training: Training, step: int) -> None:
        if not self.release_memory_every or (step + 1) % self.release_memory_every:
            return
        began = time.perf_counter()
        training.device.release_memory()
        self._seconds.append(time.perf_counter() - began)

    def after_steps(self, training: Training) -> None:
        if self.release_memory_every:
            training.details["memory_releases"] = str(len(self._seconds))
            training.details["memory_release_s"] = f"{sum(self._seconds):.6g}"


SPECS = (MemoryRelease,)
