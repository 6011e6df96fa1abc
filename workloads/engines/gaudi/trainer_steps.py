"""Rows and steps of a library's trainer: what it is given, and what each of its steps took.

The trainer is given one row after another, from the first step's to the last one's, so that it
never begins an epoch of its own: a task may arrange batches and draw a batch anew for each step.
On several cards each takes its part of a global batch, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from workloads.base import JobContext, MeasureSettings, Sample
from workloads.devices.base import Compilations
from workloads.registry import TaskSpec
from workloads.training.data import Learnable, SampleFormat, in_order
from workloads.training.technique import Inputs

if TYPE_CHECKING:
    from workloads.devices.hpu import HpuDevice

#: The tensors of one sample, each [positions].
Row = dict[str, torch.Tensor]


class Rows(torch.utils.data.Dataset[Row]):
    """All rows of all steps, all cards together, each of one shape."""

    def __init__(
        self,
        task: TaskSpec,
        form: SampleFormat,
        samples: Sequence[Learnable],
        *,
        steps: int,
        batch_size: int,
        cards: int,
    ) -> None:
        arrange = task.function("arrange") if "arrange" in task.functions else in_order
        self._batches = arrange(samples, batch_size * cards)
        self._task, self._form, self._samples = task, form, samples
        self._steps, self._batch_size, self._at_once = steps, batch_size, batch_size * cards
        self._collate = task.function("collate")

        @lru_cache(maxsize=2)  # a step is asked for row by row
        def drawn(step: int) -> Sequence[Learnable]:
            batch = [samples[index] for index in self._batches[step % len(self._batches)]]
            if "draw" not in task.functions:
                return batch
            found: Sequence[Learnable] = task.function("draw")(batch, form, step)
            return found

        self._drawn = drawn

    def __len__(self) -> int:
        return self._steps * self._at_once

    def __getitem__(self, place: int) -> Row:
        step, position = divmod(place, self._at_once)
        inputs: Inputs = self._collate([self._drawn(step)[position]], self._form, fixed=True)
        return {name: tensor[0] for name, tensor in inputs.tensors().items()}

    def of(self, step: int, rank: int) -> Sequence[Learnable]:
        """The samples that a card meets in a step."""
        first = rank * self._batch_size
        return self._drawn(step)[first : first + self._batch_size]

    def batch(self, step: int, rank: int) -> Row:
        """The tensors that a card meets in a step, each [rows, positions]."""
        first = step * self._at_once + rank * self._batch_size
        return stacked([self[place] for place in range(first, first + self._batch_size)])


def stacked(rows: Sequence[Row]) -> Row:
    """Rows as one batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Steps(TrainerCallback):  # type: ignore[misc]
    """Times each step and ends training when its time is up. Cards that train together meet before
    each step, and end it for the same reason."""

    def __init__(
        self, context: JobContext, settings: MeasureSettings, warmup: int, rows: Rows
    ) -> None:
        self._context, self._settings, self._rows = context, settings, rows
        self._times: list[tuple[float, float]] = []  # wall and CPU seconds of each step
        self._began = (0.0, 0.0)
        self._first = 0.0
        self._timed_from: float | None = None
        self._warmup = warmup
        self._warmup_cut = False
        self._compiled = Compilations()
        self.cut = False
        self.losses: list[torch.Tensor] = []

    def _any(self, mine: bool) -> bool:
        return any(self._context.collective.gather(mine))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.device.synchronize()
        now = self._context.clock()
        self._first = self._first or now
        late = self._any(now - self._first > self._settings.warmup_limit_s)
        if self._timed_from is None and (late or len(self._times) == self._warmup):
            self._context.enter_phase("measure")
            self._warmup_cut = len(self._times) < self._warmup
            self._warmup = len(self._times)
            self._compiled = self._context.device.compilations()
            self._timed_from = self._context.clock()
        self._began = (self._context.clock(), self._context.cpu_clock())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.device.synchronize()
        now, cpu = self._context.clock(), self._context.cpu_clock()
        self._times.append((now - self._began[0], cpu - self._began[1]))
        up = self._timed_from is not None
        up = up and now - (self._timed_from or 0.0) > self._settings.time_limit_s
        if self._any(up):
            self.cut = state.global_step < state.max_steps
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._compiled = self._context.device.compilations().since(self._compiled)

    def warmth(self) -> dict[str, Any]:
        """The cost of warm-up, and what it left. All steps have one shape."""
        asked = bool(self._settings.warmup)
        return {
            "warmup_s": (self._timed_from or self._first) - self._first,
            "warmup_steps": self._warmup,
            "warmup_end": ("limit" if self._warmup_cut else "complete") if asked else None,
            "shapes": 1,
            "shapes_unmet": 0 if asked else None,
            "timed_parts": 1,
            "timed_compilations": self._compiled.graphs,
            "timed_cpu_fallbacks": self._compiled.cpu_fallbacks,
        }

    def compiled(self) -> dict[str, str]:
        """Details of what was compiled in the timed part, for the row."""
        told = self._compiled.as_text()
        return {"compiled_in_timed_part": told} if told else {}

    def samples(self) -> tuple[Sample, ...]:
        """One sample a step, warm-up included."""
        rank = self._context.rank
        one = self._rows[0]
        # Both sides of a pair: a decoder works on positions of its own.
        wide = sum(
            int(one[name].numel()) for name in ("input_ids", "decoder_input_ids") if name in one
        )
        made = []
        for step, (wall_s, cpu_s) in enumerate(self._times):
            mine = self._rows.of(step, rank)
            made.append(
                Sample(
                    repeat=step,
                    batch=0,
                    warmup=step < self._warmup,
                    complete=True,
                    wall_s=wall_s,
                    cpu_s=cpu_s,
                    items=len(mine),
                    input_tokens=sum(sample.tokens for sample in mine),
                    output_tokens=0,
                    computed_tokens=wide * len(mine),
                    loss=float(self.losses[step]) if step < len(self.losses) else None,
                )
            )
        return tuple(made)


class First:
    """A card's first batch, whose loss without training is told before and after."""

    def __init__(self, task: TaskSpec, rows: Rows, rank: int, device: HpuDevice) -> None:
        self._loss = task.function("loss")
        self._batch = rows.batch(0, rank)
        self._learned = max(sum(sample.learned_tokens for sample in rows.of(0, rank)), 1)
        self._device = device

    def loss(self, model: Any) -> float:
        """Mean loss of the labelled tokens. From the logits: some of the library's classes give
        their loss in bf16, in which a few steps change nothing."""
        model.eval()
        with torch.no_grad():
            on_card = {
                name: tensor.to(self._device.torch_device) for name, tensor in self._batch.items()
            }
            labels = on_card.pop("labels")
            logits = model(**on_card, return_dict=True).logits
            loss = float(self._loss(logits, labels, None) / self._learned)
        model.train()
        return loss
