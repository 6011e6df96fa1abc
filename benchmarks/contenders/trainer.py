"""Parts of the contenders that run transformers' Trainer."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback


class InOrder(Trainer):
    """Takes samples in their order."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


class Clock(TrainerCallback):
    """Times of all steps together, and their losses."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None
        self._ended = (0.0, 0.0)
        self.losses: list[float] = []

    @property
    def wall_s(self) -> float:
        """From the beginning of the first step to the end of the last."""
        assert self._began is not None
        return self._ended[0] - self._began[0]

    @property
    def cpu_s(self) -> float:
        """CPU time of this process between them."""
        assert self._began is not None
        return self._ended[1] - self._began[1]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = self._began or (time.perf_counter(), time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ended = (time.perf_counter(), time.process_time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
