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
import errno
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration
from workloads.data.cache import cache_root, try_lock
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
    """The directory of all checkpoints on this node, made if need be.

    Raises:
        OSError: it cannot be made.
        DataMissing: the cache cannot be written to.
    """
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
    held: str = ""  # the job's directory and a rank as which another attempt still writes to it

    def path(self, step: int) -> Path:
        """File of this rank's part of a step."""
        return self.directory / f"step-{step:08}.rank-{self.rank}.pt"

    def of_rank(self, rank: int) -> Checkpoints:
        """The same, as another rank sees them."""
        return Checkpoints(directory=self.directory, rank=rank, steps_kept=self.steps_kept)

    @property
    def frozen(self) -> Path:
        """File of what does not change, where that is written once."""
        return self.directory / f"frozen.rank-{self.rank}.pt"

    def divided(self, step: int) -> Path:
        """Directory of the parts of a step that a library writes for all ranks."""
        return self.directory / f"step-{step:08}.parts"

    def steps(self) -> list[int]:
        """The steps, ascending, of which this rank's part is whole."""
        found = map(_NAME.fullmatch, os.listdir(self.directory))
        return sorted(int(m[1]) for m in found if m is not None and int(m[2]) == self.rank)

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
        """
        Raises:
            OSError: the disk has not so much room.
        """
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


def open_checkpoints(
    kept_as: str,
    *,
    rank: int,
    steps_kept: int,
    ending: Callable[[Callable[[], object]], object],
    gather: Callable[[Any], list[Any]],
) -> Checkpoints:
    """The checkpoints under a name; without one, of a directory that ends with the job.

    Args:
        kept_as: the name, safe in paths.
        rank: whose parts.
        steps_kept: so many of the last steps stay on the disk.
        ending: is given what has to be called at the job's end.
        gather: every rank's value on every rank; all ranks call this function together.

    Raises:
        OSError: the directory cannot be made, or others may write in it.
    """
    if not kept_as:
        return Checkpoints(directory=_own(ending), rank=rank, steps_kept=steps_kept)
    root = checkpoint_root()
    directory = root / kept_as
    directory.mkdir(mode=0o700, exist_ok=True)
    _verify_own(directory)
    os.utime(directory)
    _remove_old(root, directory)
    with contextlib.ExitStack() as locked:
        lock = try_lock(directory / f"held.rank-{rank}", DYING_S)
        if lock is not None:
            locked.enter_context(lock)
        # Ranks that went apart would mix this attempt's parts with those of the other one.
        held = next(filter(None, gather("" if lock else f"{directory} as rank {rank}")), "")
        if held:
            return Checkpoints(directory=_own(ending), rank=rank, steps_kept=steps_kept, held=held)
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
    """
    Raises:
        OSError: others own the directory or may write in it, so what lies there may be theirs.
    """
    found = directory.lstat()
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
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
            found = directory.lstat()
            own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not own or now - found.st_mtime <= KEPT_DAYS * 86_400:
                continue
            names = os.listdir(directory)
            if not names or not all(map(_OURS.fullmatch, names)):
                continue
            with contextlib.ExitStack() as held:
                locks = [try_lock(path) for path in directory.glob("held.rank-*")]
                for lock in filter(None, locks):
                    held.callback(lock.close)
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

    from workloads.models.precision import stored_bytes

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


def resume(training: Training, checkpoints: Checkpoints) -> None:
    """Go on from the newest step that all ranks have, if it can be read; say so in the row."""
    writer = checkpoints.of_rank(training.layout.tensor_rank)
    steps = {*checkpoints.steps()} & {*writer.steps()}
    common = set.intersection(*training.gather(steps))
    step = max(common, default=None)
    state: dict[str, Any] = {}
    if training.begins_anew:
        problem = training.begins_anew
    elif checkpoints.held:
        problem = f"another attempt still writes to {checkpoints.held}"
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
        if step is not None or checkpoints.held or training.attempt > 1:
            training.details["resumed"] = f"no, began with step 0: {problem}"
        return
    _restore(training, checkpoints, state, step)
    training.details["resumed"] = f"from step {training.first_step} of {training.steps}"
    training.details["losses_before"] = " ".join(f"{sum(each):.6g}" for each in training.losses)


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


def _restore(
    training: Training, checkpoints: Checkpoints, state: dict[str, Any], step: int
) -> None:
    own = state["own"]
    if training.divided is not None:
        training.divided.load(checkpoints.divided(step))
        state = {}
    restore(training, state, own["stateful"])
    training.first_step = step + 1
    training.losses = [(loss,) for loss in own["losses"]]
    training.random_state = own["random"]


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
    for name, each in training.stateful.items():
        each.load_state_dict(stateful[name])
