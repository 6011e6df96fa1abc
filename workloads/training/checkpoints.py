"""Checkpoints of training: directories, writing by ranks, and resuming.

A named directory (run and job) stays on the node until the job succeeds; unnamed ones end with the
attempt. Each rank writes ``step-S.rank-R.pt`` aside and renames it. Ranks may be killed between two
writes, so a gang keeps enough steps that one is complete. Of ranks with equal weights only the
first writes them; a library writes what it divides among ranks.

``NIGHTGRID_CHECKPOINTS`` replaces the node's cache, for example by shared storage, where an attempt
on a cut-off node may still write: each rank locks its part, and if one lock fails all ranks start
anew in directories of the attempt. All ranks resume from one step or none does; only this attempt's
steps are timed and counted.
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
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from workloads.base import BadConfiguration, JobDescription, Refusal
from workloads.data.cache import cache_root, flush_tree, try_lock
from workloads.models.precision import stored_bytes
from workloads.settings import choice_in_id
from workloads.training.methods import WHOLE_METHODS, method_name
from workloads.training.technique import Technique, Training
from workloads.util.processes import abandoned_directories, make_owned_directory

#: Parent directory of checkpoints, instead of the node's cache.
VARIABLE = "NIGHTGRID_CHECKPOINTS"
#: Days after which the next training removes unused checkpoints.
KEPT_DAYS = 14
#: Seconds to wait for a killed attempt's processes to release their locks.
DYING_S = 10.0
_PREFIX = "checkpoints-"
_NAME = re.compile(r"step-(\d+)\.rank-(\d+)\.pt")
#: Files that a job's directory may hold; others are foreign.
_OURS = re.compile(r"(step-\d+|frozen)\.rank-\d+\.(pt|part)|step-\d+\.parts|held\.rank-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one job, as one rank sees them."""

    directory: Path
    rank: int
    steps_kept: int = 1
    writer: str = ""  # directory and rank that another attempt still writes

    def path(self, step: int) -> Path:
        """File of this rank's part of a step."""
        return self.directory / f"step-{step:08}.rank-{self.rank}.pt"

    @property
    def frozen(self) -> Path:
        """File of frozen weights, if written once."""
        return self.directory / f"frozen.rank-{self.rank}.pt"

    def divided(self, step: int) -> Path:
        """Directory of the parts of a step that a library writes for all ranks."""
        return self.directory / f"step-{step:08}.parts"

    def steps(self) -> list[int]:
        """Steps of which this rank's part is complete, ascending."""
        names = map(_NAME.fullmatch, os.listdir(self.directory))
        return sorted(int(m[1]) for m in names if m is not None and int(m[2]) == self.rank)

    def bytes_of(self, step: int) -> int:
        """Size of a step: this rank's part, and what a library wrote for all ranks."""
        parts = [self.path(step), *self.divided(step).rglob("*")]
        return sum(part.stat().st_size for part in parts if part.is_file())

    def require_room(self, needed_bytes: int) -> None:
        """Raise OSError if the disk has less room: torch's error for a full disk names none."""
        free = shutil.disk_usage(self.directory).free
        if free < needed_bytes:
            raise OSError(
                errno.ENOSPC,
                f"a checkpoint takes {needed_bytes / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; "
                f"make room there, or set {VARIABLE} to a directory with more",
                str(self.directory),
            )

    def remove(self) -> None:
        """Remove this rank's files; the last rank also removes the directory."""
        with contextlib.suppress(FileNotFoundError):  # the last rank has been faster
            for step in self.steps():
                self.path(step).unlink(missing_ok=True)
            self.frozen.unlink(missing_ok=True)
            if not any(map(_NAME.fullmatch, os.listdir(self.directory))):
                shutil.rmtree(self.directory, ignore_errors=True)


def open_checkpoints(training: Training, steps_kept: int) -> Checkpoints:
    """Open the job's named checkpoints, or a directory of this attempt; all ranks together.

    OSError if the directory cannot be made, or others may write in it.
    """
    rank, ending = training.layout.rank, training.ending.callback
    if not training.kept_as:
        return Checkpoints(directory=_own(ending), rank=rank, steps_kept=steps_kept)
    chosen = os.environ.get(VARIABLE)
    elsewhere = f"nightgrid-checkpoints-{os.geteuid()}"  # the same on all nodes
    root = Path(chosen).expanduser() / elsewhere if chosen else cache_root() / "checkpoints"
    directory = root / training.kept_as
    root.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others:
        raise OSError(
            errno.EPERM,
            "checkpoints are read only from a directory that this user alone may write in; "
            "remove it, or chmod go-w",
            str(directory),
        )
    os.utime(directory)
    _remove_old(root, directory)
    with contextlib.ExitStack() as locked:
        lock = try_lock(directory / f"held.rank-{rank}", DYING_S)
        if lock is not None:
            locked.enter_context(lock)
        # Ranks must agree, or parts of two attempts would mix.
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
    root = cache_root()
    for left in abandoned_directories(_PREFIX, root):
        left.remove()  # of killed processes here; those of other hosts are left alone
    owned = make_owned_directory(_PREFIX, root)
    ending(owned.remove)
    return owned.path


def write_state(state: Any, target: Path) -> None:
    """Write aside, sync and rename, so that existing files are complete."""
    import torch

    aside = target.with_suffix(".part")
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, target)


def read_state(path: Path) -> dict[str, Any]:
    """Read a file of ``write_state`` into host memory, without executing code."""
    import torch

    return dict(torch.load(path, map_location="cpu", weights_only=True))


def _remove_old(root: Path, used: Path) -> None:
    """Remove old, unlocked directories of checkpoints only; ages by the file system's clock."""
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
        except OSError:  # just removed by another job, or unreadable
            continue


class Saver:
    """Writes one rank's checkpoints, the newest over the ones before."""

    def __init__(self, checkpoints: Checkpoints, mode: str) -> None:
        self.checkpoints = checkpoints
        self.saved = 0
        self._mode = mode
        self.stalled_s = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._pending: Future[None] | None = None

    def require_room(self, training: Training) -> None:
        """Raise OSError if the disk has no room for one more checkpoint."""
        if training.layout.data_rank:
            return  # it writes next to nothing
        trained, frozen = weights_of(training.model)
        weights = tensor_bytes([trained, frozen])
        # AdamW's two averages are the largest state of our optimizers; ZeRO's parts are similar.
        once = weights + 2 * tensor_bytes(training.trainable())
        there = sum(map(self.checkpoints.bytes_of, self.checkpoints.steps()))  # will be replaced
        self.checkpoints.require_room(once * (self.checkpoints.steps_kept + 1) - there)

    def save(self, training: Training, step: int) -> None:
        """Save and record the stall; raises errors of this write or the previous one."""
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
            parts = checkpoints.divided(step)
            training.divided.save_checkpoint(str(parts.parent), tag=parts.name, save_latest=False)
            flush_tree(parts)
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
        self.stalled_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the pending write; raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def checked(self, training: Training) -> str:
        """Read the newest checkpoint, compare its frozen weights with the model, describe it."""
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
        checkpoints = self.checkpoints
        write_state(state, checkpoints.path(step))
        steps = checkpoints.steps()
        before = [one for one in steps if one <= step]  # later ones are of an abandoned attempt
        for old in {*steps} - {*before[-checkpoints.steps_kept :]}:
            checkpoints.path(old).unlink(missing_ok=True)
            # No rank resumes from this step now, and rank 0 may be on another node.
            shutil.rmtree(checkpoints.divided(old), ignore_errors=True)


def read_newest(checkpoints: Checkpoints, step: int | None = None) -> dict[str, Any]:
    """Read a step (default newest): ``step``, ``weights`` by name, ``optimizer``, if written."""
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
    """Trained tensors (tied ones under every name) and all other tensors, by name."""
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
    """Copy a structure with all tensors in host memory."""
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
    """Resume from the newest step that all ranks have, if readable; note it in the row."""
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
        parts = checkpoints.divided(step)
        read, _ = training.divided.load_checkpoint(str(parts.parent), tag=parts.name)
        if read is None:
            raise BadConfiguration(f"DeepSpeed reads no checkpoint in {parts}")
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
    """This rank's state to resume from, or the reason why it cannot."""
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
    """Restore weights and optimizer if given, and other stateful objects."""
    import torch

    if state:
        with torch.no_grad():
            for name, tensor in training.model.state_dict().items():
                # Others (quantized and frozen) are as loaded from the model.
                if name in state["weights"] and type(tensor) is torch.Tensor:
                    tensor.copy_(state["weights"][name])
        training.optimizer.load_state_dict(state["optimizer"])
    for name, part in training.stateful.items():
        part.load_state_dict(stateful[name])


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

    save_every: int = choice_in_id(
        0,
        ge=0,
        description="Write a checkpoint (weights, optimizer, step, random states) after every so "
        "many optimizer steps, within their time; 0: never. It is read back after the last step, "
        "and removed when the job has succeeded; a retry on the node goes on from it.",
    )
    save_mode: Literal["blocking", "async", "incremental"] | None = choice_in_id(
        None,
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

    def on_optimizer(self, training: Training) -> None:
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
        saver = self._saver
        saver.wait()
        if saver.saved:
            newest = saver.checkpoints.steps()[-1]
            training.details |= {
                "checkpoints": f"{saver.saved} {self.save_mode or 'blocking'}",
                "checkpoint_stall_s": f"{saver.stalled_s:.6g}",
                "checkpoint_bytes": str(saver.checkpoints.bytes_of(newest)),
                "checkpoint_read": saver.checked(training),
            }


SPECS = (Saving,)
