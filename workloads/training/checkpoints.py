"""Checkpoints of training: their directories, how ranks write them, and how a retry goes on.

Under a name (of a run and a job) a directory lies on the node until the job has succeeded, so that
the next attempt there goes on from it; an attempt without a name has one of its own that ends with
it. Each rank writes ``step-S.rank-R.pt``, aside and then renamed, when its part of a step is whole.
Ranks of a gang may be killed between two of those, so a gang keeps as many steps as surely have one
that all ranks have written. Of ranks that hold the same weights only the first writes them; what a
library divides among ranks is written by that library.

``NIGHTGRID_CHECKPOINTS`` names another place than the node's cache, such as one that nodes share; a
folder of this user is made there for them. Where they share it, an attempt that a driver has given
up may still write on a node that was cut off: each rank holds a lock on its part, and where one
does not get it all of them begin anew, in directories that end with the attempt. All ranks go on
from the same step or none does; steps of the attempt before are not timed or counted here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration
from workloads.data.cache import cache_root, try_lock
from workloads.models.precision import stored_bytes
from workloads.training.technique import Training
from workloads.util.processes import abandoned_directories, make_owned_directory

#: A directory that has the folder of checkpoints, instead of the node's cache.
VARIABLE = "NIGHTGRID_CHECKPOINTS"
#: Days after which checkpoints of jobs that nobody tried again are removed by the next training.
KEPT_DAYS = 14
#: Seconds for the processes of an attempt that was killed to be gone, and their locks with them.
DYING_S = 10.0
_PREFIX = "checkpoints-"
_FOLDER = "checkpoints"
_FOLDER_ELSEWHERE = "nightgrid-checkpoints-{user}"
_NAME = re.compile(r"step-(\d+)\.rank-(\d+)\.pt")
#: All that a job's directory may hold: whatever else is there is somebody else's.
_OURS = re.compile(r"(step-\d+|frozen)\.rank-\d+\.(pt|part)|step-\d+\.parts|held\.rank-\d+")


def checkpoint_root() -> Path:
    """The directory of all checkpoints on this node, made if need be."""
    chosen = os.environ.get(VARIABLE)
    elsewhere = _FOLDER_ELSEWHERE.format(user=os.geteuid())  # the same on all nodes
    root = Path(chosen).expanduser() / elsewhere if chosen else cache_root() / _FOLDER
    root.mkdir(parents=True, exist_ok=True)
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one job, as one rank sees them."""

    directory: Path
    rank: int
    steps_kept: int = 1
    writer: str = ""  # the job's directory and a rank as which another attempt still writes to it

    def path(self, step: int) -> Path:
        """File of this rank's part of a step."""
        return self.directory / f"step-{step:08}.rank-{self.rank}.pt"

    @property
    def frozen(self) -> Path:
        """File of what does not change, where that is written once."""
        return self.directory / f"frozen.rank-{self.rank}.pt"

    def divided(self, step: int) -> Path:
        """Directory of the parts of a step that a library writes for all ranks."""
        return self.directory / f"step-{step:08}.parts"

    def steps(self) -> list[int]:
        """The steps, ascending, of which this rank's part is whole."""
        names = map(_NAME.fullmatch, os.listdir(self.directory))
        return sorted(int(m[1]) for m in names if m is not None and int(m[2]) == self.rank)

    def keep_last(self, newest: int) -> None:
        """Of this rank's parts keep those of the step that was just written and of the last ones
        before it; a later one is of an attempt from which none has gone on."""
        steps = self.steps()
        before = [step for step in steps if step <= newest]
        for step in {*steps} - {*before[-self.steps_kept :]}:
            self.path(step).unlink(missing_ok=True)
            # No rank goes on from this step now, and rank 0 may be on another node.
            shutil.rmtree(self.divided(step), ignore_errors=True)

    def bytes_of(self, step: int) -> int:
        """Size of a step: this rank's part, and what a library wrote for all ranks."""
        parts = [self.path(step), *self.divided(step).rglob("*")]
        return sum(part.stat().st_size for part in parts if part.is_file())

    def require_room(self, needed_bytes: int) -> None:
        """Raise OSError where the disk has not so much room."""
        free = shutil.disk_usage(self.directory).free
        if free < needed_bytes:
            raise OSError(
                errno.ENOSPC,
                f"a checkpoint takes {needed_bytes / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; "
                f"make room there, or set {VARIABLE} to a directory with more",
                str(self.directory),
            )

    def remove(self) -> None:
        """Remove this rank's files, and with the last rank's the directory."""
        with contextlib.suppress(FileNotFoundError):  # the last rank has been faster
            for step in self.steps():
                self.path(step).unlink(missing_ok=True)
            self.frozen.unlink(missing_ok=True)
            if not any(map(_NAME.fullmatch, os.listdir(self.directory))):
                shutil.rmtree(self.directory, ignore_errors=True)


def open_checkpoints(training: Training, steps_kept: int) -> Checkpoints:
    """The checkpoints under the job's name, of which the last steps stay on the disk; without a
    name, of a directory that ends with the attempt. All ranks call this together.

    Raises:
        OSError: the directory cannot be made, or others may write in it.
    """
    rank, ending = training.layout.rank, training.ending.callback
    if not training.kept_as:
        return Checkpoints(directory=_own(ending), rank=rank, steps_kept=steps_kept)
    root = checkpoint_root()
    directory = root / training.kept_as
    directory.mkdir(mode=0o700, exist_ok=True)
    _verify_own(directory)
    os.utime(directory)
    _remove_old(root, directory)
    with contextlib.ExitStack() as locked:
        lock = try_lock(directory / f"held.rank-{rank}", DYING_S)
        if lock is not None:
            locked.enter_context(lock)
        # Ranks that went apart would mix this attempt's parts with those of the other one.
        own = "" if lock else f"{directory} as rank {rank}"
        if writer := next(filter(None, training.gather(own)), ""):
            return Checkpoints(
                directory=_own(ending), rank=rank, steps_kept=steps_kept, writer=writer
            )
        ending(locked.pop_all().close)
    checkpoints = Checkpoints(directory=directory, rank=rank, steps_kept=steps_kept)
    for aside in directory.glob(f"*.rank-{rank}.part"):
        aside.unlink(missing_ok=True)  # of an attempt that was killed while it wrote
    return checkpoints


def _own(ending: Callable[[Callable[[], object]], object]) -> Path:
    """A directory that ends with the attempt."""
    root = cache_root()
    for left in abandoned_directories(_PREFIX, root):
        left.remove()  # of killed processes here; those of other hosts are left alone
    owned = make_owned_directory(_PREFIX, root)
    ending(owned.remove)
    return owned.path


def write_state(state: Any, target: Path) -> None:
    """Aside, to the disk, then under its name: a file that is there is whole."""
    import torch

    aside = target.with_suffix(".part")
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, target)


def read_state(path: Path) -> dict[str, Any]:
    """A file that ``write_state`` wrote, in host memory; nothing in it is run."""
    import torch

    return dict(torch.load(path, map_location="cpu", weights_only=True))


def _verify_own(directory: Path) -> None:
    """Refuse a directory that others own or may write in: what lies there may be theirs."""
    status = directory.lstat()
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others:
        raise OSError(
            errno.EPERM,
            "checkpoints are read only from a directory that this user alone may write in; "
            "remove it, or chmod go-w",
            str(directory),
        )


def _remove_old(root: Path, used: Path) -> None:
    """Remove what nobody has gone on from for long; ages by the file system's own clock.

    Only directories that hold checkpoints and nothing else: people may put their own there. None
    that an attempt holds, which may save once in many days.
    """
    now = used.stat().st_mtime
    for directory in root.iterdir():
        try:
            status = directory.lstat()
            own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            names = os.listdir(directory) if own else []
            old = now - status.st_mtime > KEPT_DAYS * 86_400
            if not old or not names or not all(map(_OURS.fullmatch, names)):
                continue
            with contextlib.ExitStack() as locked:
                locks = [try_lock(path) for path in directory.glob("held.rank-*")]
                for lock in filter(None, locks):
                    locked.callback(lock.close)
                if None not in locks:
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # removed by another job in the same moment, or not to be read
            continue


class Saver:
    """Writes one rank's checkpoints, the newest over the ones before."""

    def __init__(self, checkpoints: Checkpoints, mode: str) -> None:
        self.checkpoints = checkpoints
        self.saved = 0
        self._mode = mode
        self._stalls: list[float] = []  # seconds
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._pending: Future[None] | None = None

    def require_room(self, training: Training) -> None:
        """Raise OSError where the disk has no room for a checkpoint beside those that are kept."""
        if training.layout.data_rank:
            return  # it writes next to nothing
        trained, frozen = weights_of(training.model)
        weights = tensor_bytes([trained, frozen])
        # AdamW's two averages, the most that our optimizers keep; parts of ZeRO are about as much.
        once = weights + 2 * tensor_bytes(training.trainable())
        there = sum(map(self.checkpoints.bytes_of, self.checkpoints.steps()))  # will be replaced
        self.checkpoints.require_room(once * (self.checkpoints.steps_kept + 1) - there)

    def save(self, training: Training, step: int) -> None:
        """Save, and count the time until training may go on; raises what this one, or the one
        before, could not be written for."""
        began = time.perf_counter()
        self.wait()
        checkpoints = self.checkpoints
        state = {
            "step": step,
            "random": training.device.random_state(),
            "losses": [sum(float(loss) for loss in parts) for parts in training.losses],
            "stateful": {name: part.state_dict() for name, part in training.stateful.items()},
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
        checkpoints.require_room(tensor_bytes(state))
        if self._mode == "async":
            self._pending = self._writer.submit(self._replace, on_host(state), step)
        else:
            self._replace(state, step)
        self.saved += 1
        self._stalls.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Wait until nothing is being written; raises what the last could not be written for."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def details(self, training: Training) -> dict[str, str]:
        """For the row, with what was read back."""
        newest = self.checkpoints.steps()[-1]
        return {
            "checkpoints": f"{self.saved} {self._mode}",
            "checkpoint_stall_s": f"{sum(self._stalls):.6g}",
            "checkpoint_bytes": str(self.checkpoints.bytes_of(newest)),
            "checkpoint_read": self.checked(training),
        }

    def checked(self, training: Training) -> str:
        """Read the newest checkpoint and describe it; what is frozen must be as in the model."""
        import torch

        state = read_newest(self.checkpoints)
        if training.divided is not None or training.layout.data_rank:
            return f"step {state['step']}"
        text = f"step {state['step']}, {len(state['weights'])} tensors"
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
        return text

    def _replace(self, state: dict[str, Any], step: int) -> None:
        write_state(state, self.checkpoints.path(step))
        self.checkpoints.keep_last(step)


def read_newest(checkpoints: Checkpoints, step: int | None = None) -> dict[str, Any]:
    """A checkpoint, the newest unless a step is given: ``step``, ``weights`` by name, and the
    ``optimizer``'s state, as far as this rank has written them."""
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


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested lists and dictionaries."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return sum(map(stored_bytes, tensors))


def on_host(value: Any) -> Any:
    """A copy, all tensors in host memory."""
    import torch
    from torch.utils._pytree import tree_map

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if hasattr(leaf, "__tensor_flatten__"):  # e.g. 8-bit state: not all of them have a copy
            names, rest = leaf.__tensor_flatten__()
            parts = {name: copied(getattr(leaf, name)) for name in names}
            kind: Any = type(leaf)
            return kind.__tensor_unflatten__(parts, rest, leaf.size(), leaf.stride())
        detached = leaf.detach()
        return detached.clone() if detached.device.type == "cpu" else detached.cpu()

    return tree_map(copied, value)


def resume(training: Training, checkpoints: Checkpoints) -> None:
    """Go on from the newest step that all ranks have, if it can be read; say so in the row."""
    writer = dataclasses.replace(checkpoints, rank=training.layout.tensor_rank)
    steps = {*checkpoints.steps()} & {*writer.steps()}
    common = set.intersection(*training.gather(steps))
    step = max(common, default=None)
    state: dict[str, Any] = {}
    if training.begins_anew:
        problem = training.begins_anew
    elif checkpoints.writer:
        problem = f"another attempt still writes to {checkpoints.writer}"
    elif step is None:
        problem = f"no checkpoint in {checkpoints.directory}"
    elif training.steps - (step + 1) < training.least_steps:
        problem = (
            f"the checkpoint is of step {step + 1} of {training.steps}, and a row needs "
            f"{training.least_steps} more, warm-up included"
        )
    else:
        state, problem = _read(training, checkpoints, writer, step)
    problem = next(filter(None, training.gather(problem)), "")
    if step is None or problem:
        if step is not None or checkpoints.writer or training.attempt > 1:
            training.details["resumed"] = f"no, began with step 0: {problem}"
        return
    own = state["own"]
    if training.divided is not None:
        training.divided.load(checkpoints.divided(step))
        state = {}
    restore(training, state, own["stateful"])
    training.first_step = step + 1
    training.losses = [(loss,) for loss in own["losses"]]
    training.random_state = own["random"]
    training.details["resumed"] = f"from step {training.first_step} of {training.steps}"
    training.details["losses_before"] = " ".join(f"{loss:.6g}" for loss in own["losses"])


def _read(
    training: Training, checkpoints: Checkpoints, writer: Checkpoints, step: int
) -> tuple[dict[str, Any], str]:
    """The state that this rank goes on from, and a reason where it cannot."""
    try:
        state = read_newest(writer, step) | {"own": read_state(checkpoints.path(step))}
    except Exception as error:  # torch raises many kinds for a file that is damaged
        return {}, f"the checkpoint of step {step + 1} cannot be read: {error}"
    trained, frozen = weights_of(training.model)
    shapes = {name: tensor.shape for name, tensor in {**trained, **frozen}.items()}
    read = {name: tensor.shape for name, tensor in state["weights"].items()}
    if training.divided is None and read != shapes:
        return {}, f"the checkpoint of step {step + 1} is of another model"
    return state, ""


def restore(training: Training, state: dict[str, Any], stateful: dict[str, Any]) -> None:
    """Put weights and optimizer back to a state, where there is one, and what else remembers."""
    import torch

    if state:
        with torch.no_grad():
            for name, tensor in training.model.state_dict().items():
                # Others (quantised and frozen) were loaded from the model as they were.
                if name in state["weights"] and type(tensor) is torch.Tensor:
                    tensor.copy_(state["weights"][name])
        training.optimizer.load_state_dict(state["optimizer"])
    for name, part in training.stateful.items():
        part.load_state_dict(stateful[name])
