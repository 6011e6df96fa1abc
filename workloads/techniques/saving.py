"""Checkpoints during training: what a night of training does not lose when a card dies.

A checkpoint has everything that training needs to go on: weights, the optimizer's state, the number
of the step. *blocking* writes it while the card waits. *async* copies it to host memory and lets
a thread write, so that only the copy (and a writer that is still busy) stalls training. With
*incremental*, what is frozen is written once, and then only what has been trained. Files are
written aside, synced and renamed, and the newest is read back after the last step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.cache import cache_root
from workloads.errors import BadConfiguration
from workloads.finetuning_method import WHOLE_METHODS, method_name
from workloads.owned_directory import abandoned_directories, make_owned_directory
from workloads.refusal import Asked, Refusal
from workloads.settings import setting
from workloads.techniques.base import Technique, Training

_FROZEN = "frozen.pt"
_PREFIX = "checkpoints-"


class Saving(Technique):
    """Checkpoints of training, saved as it goes."""

    name: ClassVar[str] = "saving"
    title: ClassVar[str] = "checkpoints during training"
    order: ClassVar[int] = 150

    save_every: int = setting(
        0,
        role="choice",
        always_in_id=True,
        ge=0,
        description="Write a checkpoint (weights, optimizer, step) after every so many optimizer "
        "steps, within their time; 0: never. It is read back after the last step, then removed.",
    )
    save_mode: Literal["blocking", "async", "incremental"] | None = setting(
        None,
        role="choice",
        always_in_id=True,
        description="blocking waits until a checkpoint is on disk, async only for a copy in host "
        "memory; incremental writes what is frozen once. Left out: blocking.",
    )

    _savers: list[Saver] = PrivateAttr(default_factory=list)

    def refusals(self, asked: Asked) -> Iterable[Refusal]:
        parameters = asked.parameters
        if self.save_mode is not None and not self.save_every:
            yield Refusal(
                setting="save_mode",
                reason="nothing is saved",
                hint="write save_every: 10, say, or leave save_mode out",
            )
        if not self.save_every:
            return
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
        if asked.cards > 1 and (strategy != "ddp" or (parameters.get("tensor_parallel") or 1) > 1):
            yield Refusal(
                setting="save_every",
                reason="this version saves no training whose state is split over cards",
                hint="write strategy: ddp",
                unsupported=True,
            )

    def on_optimizer(self, training: Training) -> None:
        if not self.save_every:
            return
        root = cache_root()
        _remove_abandoned(root)
        directory = make_owned_directory(_PREFIX, root)
        training.ending.callback(directory.remove)
        saver = Saver(directory.path, self.save_mode or "blocking")
        training.ending.callback(saver.wait)
        self._savers.append(saver)

    def after_step(self, training: Training, step: int) -> None:
        # The ranks of a data-parallel gang hold the same.
        if self._savers and training.layout.rank == 0 and (step + 1) % self.save_every == 0:
            self._savers[0].save(training, step)

    def after_steps(self, training: Training) -> None:
        for saver in self._savers:
            saver.wait()
            if saver.saved:
                training.details |= saver.details() | {"checkpoint_read": _checked(saver, training)}


class Saver:
    """Writes checkpoints into a directory, the newest over the one before."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.directory = directory
        self.saved = 0
        self._mode = mode
        self._stalls: list[float] = []  # seconds, of each
        self._writer: threading.Thread | None = None
        self._failures: list[BaseException] = []

    def save(self, training: Training, step: int) -> None:
        """Save, and count the time until training may go on.

        Raises:
            OSError: it cannot be written, or the one before could not.
        """
        began = time.perf_counter()
        self.wait()
        trained, frozen = _weights(training.model)
        state = {"step": step, "trained": trained, "optimizer": training.optimizer.state_dict()}
        if self._mode != "incremental":
            state["frozen"] = frozen
        elif not self.saved:
            write_state({"frozen": frozen}, self.directory / _FROZEN)
        target = self.directory / f"step-{step:08}.pt"
        if self._mode == "async":
            self._write_later(_on_host(state), target)
        else:
            self._replace(state, target)
        self.saved += 1
        self._stalls.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            OSError: the last could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failures:
            raise self._failures.pop()

    def details(self) -> dict[str, str]:
        """For the row."""
        newest = max(self.directory.glob("step-*.pt"))
        return {
            "checkpoints": f"{self.saved} {self._mode}",
            "checkpoint_stall_s": f"{sum(self._stalls):.6g}",
            "checkpoint_bytes": str(newest.stat().st_size),
        }

    def _write_later(self, state: dict[str, Any], target: Path) -> None:
        def write() -> None:
            try:
                self._replace(state, target)
            except BaseException as error:  # raised again where training waits
                self._failures.append(error)

        self._writer = threading.Thread(target=write, name="checkpoint-writer")
        self._writer.start()

    def _replace(self, state: dict[str, Any], target: Path) -> None:
        older = list(self.directory.glob("step-*.pt"))
        write_state(state, target)
        for file in older:
            file.unlink()


def read_newest(directory: Path) -> dict[str, Any]:
    """The newest checkpoint: ``step``, ``weights`` by name, and the ``optimizer``'s state.

    Raises:
        FileNotFoundError: there is none.
    """
    import torch

    files = sorted(directory.glob("step-*.pt"))
    if not files:
        raise FileNotFoundError(f"no checkpoint in {directory}")
    state = torch.load(files[-1], map_location="cpu", weights_only=True)
    if "frozen" not in state:
        state |= torch.load(directory / _FROZEN, map_location="cpu", weights_only=True)
    return {
        "step": state["step"],
        "weights": {**state["frozen"], **state["trained"]},
        "optimizer": state["optimizer"],
    }


def _remove_abandoned(root: Path) -> None:
    """Remove what killed processes left; those of other hosts and containers are left alone."""
    for directory in abandoned_directories(_PREFIX, root):
        directory.remove()


def _checked(saver: Saver, training: Training) -> str:
    """Read the newest checkpoint and describe it; what is frozen must be as it is in the model."""
    import torch

    state = read_newest(saver.directory)
    trained, frozen = _weights(training.model)
    if state["weights"].keys() != trained.keys() | frozen.keys():
        raise BadConfiguration("the checkpoint that was read back has other weights than the model")
    for name, tensor in {**trained, **frozen}.items():
        read = state["weights"][name]
        same = torch.equal(read, tensor.cpu()) if name in frozen else read.shape == tensor.shape
        if not same:
            raise BadConfiguration(f"the checkpoint that was read back has another {name}")
    return f"step {state['step']}, {len(state['weights'])} tensors"


def _weights(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's tensors by name: those that are trained, and all others."""
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        (trained if name in learning else frozen)[name] = tensor
    return trained, frozen


def _on_host(value: Any) -> Any:
    """A copy, all tensors in host memory."""
    import torch

    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):  # e.g. 8-bit state: not all of them have a copy
            names, rest = value.__tensor_flatten__()
            parts = {name: _on_host(getattr(value, name)) for name in names}
            kind: Any = type(value)
            return kind.__tensor_unflatten__(parts, rest, value.size(), value.stride())
        detached = value.detach()
        return detached.clone() if detached.device.type == "cpu" else detached.cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value


def write_state(state: Any, target: Path) -> None:
    """Aside, to the disk, then under its name: a file that is there is whole."""
    import torch

    aside = target.with_suffix(".part")
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, target)


SPEC = Saving
