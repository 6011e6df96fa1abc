"""Checkpoints during training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.base import JobDescription, Refusal
from workloads.settings import choice
from workloads.training.methods import WHOLE_METHODS, method_name
from workloads.training.technique import Technique, Training

if TYPE_CHECKING:
    from workloads.training.checkpoints import Saver

#: Strategies whose state can be saved, and those of them whose library writes it.
_BY_LIBRARY = ("zero0", "zero1", "zero2", "zero3")
_SAVED = ("ddp", "tensor-parallel", *_BY_LIBRARY)


class Saving(Technique):
    """Checkpoints during training: a card may die without costing the whole training.

    A checkpoint has everything that training needs to go on: weights, the optimizer's state, the
    number of the step, random states, losses so far. *blocking* writes it while the card waits.
    *async* copies it to host memory and lets a thread write, so that only the copy (and a writer
    that is still busy) stalls training. With *incremental*, what is frozen is written once, and
    then only what has been trained. Files are written aside, synced and renamed, and the newest is
    read back after the last step.

    Checkpoints stay until the job has succeeded. A later attempt on the node goes on from the
    newest, and its row says from which step (``resumed``) and the losses before
    (``losses_before``); its figures are of its own steps alone. Where fewer steps are left than
    warm-up and ``min_repeats`` ask for, it begins anew. They lie in ``checkpoints`` of the node's
    cache, or in ``nightgrid-checkpoints-UID`` of the directory that NIGHTGRID_CHECKPOINTS names:
    where nodes share that, an attempt on another node goes on too; else it begins anew, and the row
    says so, as where an attempt of a node that was cut off still writes there. One takes the bytes
    of the weights and, for AdamW, twice those of what is trained: 37 GB for 6.2 billion weights
    trained whole in bf16. A gang keeps the last two (async: three), one card one, and each needs
    room for one more while it writes; a job without that room fails before its first step. What
    nobody goes on from is removed after 14 days.
    """

    name: ClassVar[str] = "saving"
    title: ClassVar[str] = "checkpoints during training"
    order: ClassVar[int] = 150
    beside: ClassVar[Any] = {"save_mode": ("save_every", ())}

    save_every: int = choice(
        0,
        always_in_id=True,
        ge=0,
        description="Write a checkpoint (weights, optimizer, step, random states) after every so "
        "many optimizer steps, within their time; 0: never. It is read back after the last step, "
        "and removed when the job has succeeded; a retry on the node goes on from it.",
    )
    save_mode: Literal["blocking", "async", "incremental"] | None = choice(
        None,
        always_in_id=True,
        description="blocking waits until a checkpoint is on disk, async only for a copy in host "
        "memory; incremental writes what is frozen once. Left out: blocking.",
    )

    _saver: Saver

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        parameters = job.parameters
        frozen = parameters.get("freeze_layers") or parameters.get("freeze_embeddings")
        method = method_name(parameters)
        whole = method in WHOLE_METHODS and not frozen
        if self.save_mode == "incremental" and whole:
            yield Refusal(
                setting="save_mode",
                reason=f"method {method} changes all weights in every step, so that "
                "an increment is the whole model",
                hint="write save_mode: async, or freeze layers",
            )
        strategy = parameters.get("strategy") or "ddp"
        if job.cards > 1 and strategy not in _SAVED:
            yield Refusal(
                setting="save_every",
                reason=f"this version saves no training by strategy {strategy}",
                hint=f"write strategy: {', '.join(_SAVED)}",
                unsupported=True,
            )
        if strategy in _BY_LIBRARY and self.save_mode not in (None, "blocking"):
            yield Refusal(
                setting="save_mode",
                reason=f"under strategy {strategy} DeepSpeed writes its parts, and training waits",
                hint="write save_mode: blocking, or strategy: ddp",
                unsupported=True,
            )

    def on_optimizer(self, training: Training) -> None:
        from workloads.training.checkpoints import Saver, open_checkpoints, resume

        mode = self.save_mode or "blocking"
        # Ranks may be one write apart, two with a writing thread.
        of_gang = 3 if mode == "async" else 2
        checkpoints = open_checkpoints(training, of_gang if training.cards > 1 else 1)
        saver = self._saver = Saver(checkpoints, mode)
        saver.require_room(training)
        if training.kept_as:

            def leave(kind: type[BaseException] | None, *_: Any) -> None:
                if kind is None:
                    checkpoints.remove()

            training.job_ending.push(leave)
            resume(training, checkpoints)
        training.ending.callback(saver.wait)

    def after_step(self, training: Training, step: int) -> None:
        if (step + 1) % self.save_every == 0:
            self._saver.save(training, step)

    def after_steps(self, training: Training) -> None:
        self._saver.wait()
        if self._saver.saved:
            training.details |= self._saver.details(training)


SPECS = (Saving,)
