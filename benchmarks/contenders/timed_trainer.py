"""One timed training by a trainer of transformers', for the peers of our training workloads.

Timed is from the end of the first step to the end of the last: no loading, no setting up, and not
the step in which memory is taken and kernels are chosen.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments


def _in_order(trainer: Any) -> Any:
    """A trainer of the library that takes samples in their order."""

    class InOrder(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    return InOrder


class _Clock(TrainerCallback):
    """Ends of steps, and their losses."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, float]] = []
        self.losses: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended.append((time.perf_counter(), time.process_time()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def timed(
    model: Any,
    samples: Sequence[Any],
    collate: Callable[[list[Any]], Any] | None,
    *,
    trainer: Any = Trainer,
    arguments: Any = TrainingArguments,
    **settings: Any,
) -> dict[str, Any]:
    """Train once over the samples in their order, whole batches of them, with these settings beside
    the common ones."""
    clock = _Clock()
    with tempfile.TemporaryDirectory() as output:
        told = arguments(
            output_dir=output,
            num_train_epochs=1,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **settings,
        )
        _in_order(trainer)(
            model=model,
            args=told,
            train_dataset=samples,
            data_collator=collate,
            callbacks=[clock],
        ).train()
    first, last = clock.ended[0], clock.ended[-1]
    return {
        "work": len(samples) - told.per_device_train_batch_size,
        "wall_s": last[0] - first[0],
        "cpu_s": last[1] - first[1],
        "losses": clock.losses,
        "threads": torch.get_num_threads(),
    }
