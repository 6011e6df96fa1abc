"""One rank's checkpoints, written as training goes, and read back.

Of ranks that hold the same weights only the first writes them; what each has of its own (random
states, losses) it writes itself. Weights and optimizer that a library divides among ranks are
written by that library, before the ranks' own files say that the step is whole.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from workloads.base import BadConfiguration
from workloads.techniques.base import Training
from workloads.training.checkpoints import Checkpoints, read_state, write_state


class Saver:
    """Writes one rank's checkpoints, the newest over the ones before."""

    def __init__(self, checkpoints: Checkpoints, mode: str) -> None:
        self.checkpoints = checkpoints
        self.saved = 0
        self._mode = mode
        self._stalls: list[float] = []  # seconds, of each
        self._writer: threading.Thread | None = None
        self._failures: list[BaseException] = []

    def require_room(self, training: Training) -> None:
        """
        Raises:
            OSError: the disk has no room for a checkpoint beside those that are kept.
        """
        if training.layout.data_rank:
            return  # it writes next to nothing
        trained, frozen = weights_of(training.model)
        weights = _bytes([*trained.values(), *frozen.values()])
        # AdamW's two averages, the most that our optimizers keep; parts of ZeRO are about as much.
        once = weights + 2 * _bytes(training.trainable())
        there = sum(map(self.checkpoints.bytes_of, self.checkpoints.steps()))  # will be replaced
        self.checkpoints.require_room(once * (self.checkpoints.steps_kept + 1) - there)

    def save(self, training: Training, step: int) -> None:
        """Save, and count the time until training may go on.

        Raises:
            OSError: it cannot be written, or the one before could not.
        """
        began = time.perf_counter()
        self.wait()
        checkpoints = self.checkpoints
        state = {
            "step": step,
            "random": training.device.random_state(),
            "losses": [sum(float(loss) for loss in parts) for parts in training.losses],
            "stateful": {name: each.state_dict() for name, each in training.stateful.items()},
        }
        if training.divided is not None:
            training.divided.save(checkpoints.divided(step))
        elif not training.layout.data_rank:  # other data-parallel ranks hold the same
            trained, frozen = weights_of(training.model)
            state |= {"trained": trained, "optimizer": training.optimizer.state_dict()}
            if self._mode != "incremental":
                state["frozen"] = frozen
            elif not self.saved:
                write_state({"frozen": frozen}, checkpoints.frozen)
        checkpoints.require_room(_bytes(state))
        if self._mode == "async":
            self._write_later(on_host(state), step)
        else:
            self._replace(state, step)
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
        newest = self.checkpoints.steps()[-1]
        return {
            "checkpoints": f"{self.saved} {self._mode}",
            "checkpoint_stall_s": f"{sum(self._stalls):.6g}",
            "checkpoint_bytes": str(self.checkpoints.bytes_of(newest)),
        }

    def checked(self, training: Training) -> str:
        """Read the newest checkpoint and describe it; what is frozen must be as in the model.

        Raises:
            BadConfiguration: it is not.
        """
        import torch

        state = read_newest(self.checkpoints)
        if training.divided is not None or training.layout.data_rank:
            return f"step {state['step']}"
        told = f"step {state['step']}, {len(state['weights'])} tensors"
        trained, frozen = weights_of(training.model)
        if state["weights"].keys() != trained.keys() | frozen.keys():
            raise BadConfiguration(
                "the checkpoint that was read back has other weights than the model"
            )
        for name, tensor in {**trained, **frozen}.items():
            read = state["weights"][name]
            same = torch.equal(read, tensor.cpu()) if name in frozen else read.shape == tensor.shape
            if not same:
                raise BadConfiguration(f"the checkpoint that was read back has another {name}")
        return told

    def _write_later(self, state: dict[str, Any], step: int) -> None:
        def write() -> None:
            try:
                self._replace(state, step)
            except BaseException as error:  # raised again where training waits
                self._failures.append(error)

        self._writer = threading.Thread(target=write, name="checkpoint-writer")
        self._writer.start()

    def _replace(self, state: dict[str, Any], step: int) -> None:
        write_state(state, self.checkpoints.path(step))
        self.checkpoints.keep_last(step)


def read_newest(checkpoints: Checkpoints, step: int | None = None) -> dict[str, Any]:
    """A checkpoint, the newest unless told: ``step``, ``weights`` by name, and the ``optimizer``'s
    state, as far as this rank has written them.

    Raises:
        FileNotFoundError: there is none.
    """
    steps = checkpoints.steps() if step is None else [step]
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {checkpoints.directory}")
    state = read_state(checkpoints.path(steps[-1]))
    if "trained" in state and "frozen" not in state:
        state |= read_state(checkpoints.frozen)
    return {
        "step": state["step"],
        "weights": {**state.get("frozen", {}), **state.get("trained", {})},
        "optimizer": state.get("optimizer"),
    }


def weights_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's tensors by name: those that are trained, by each name that they have, and all
    others."""
    named = model.named_parameters(remove_duplicate=False)  # tied weights have two names
    learning = {name for name, parameter in named if parameter.requires_grad}
    trained: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        (trained if name in learning else frozen)[name] = tensor
    return trained, frozen


def _bytes(value: Any) -> int:
    """Bytes of all tensors in nested lists and dictionaries."""
    import torch

    from workloads.weights import stored_bytes

    if isinstance(value, torch.Tensor):
        return stored_bytes(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def on_host(value: Any) -> Any:
    """A copy, all tensors in host memory."""
    import torch

    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):  # e.g. 8-bit state: not all of them have a copy
            names, rest = value.__tensor_flatten__()
            parts = {name: on_host(getattr(value, name)) for name in names}
            kind: Any = type(value)
            return kind.__tensor_unflatten__(parts, rest, value.size(), value.stride())
        detached = value.detach()
        return detached.clone() if detached.device.type == "cpu" else detached.cpu()
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(item) for item in value)
    return value
