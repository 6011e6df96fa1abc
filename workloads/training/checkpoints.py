"""Directories of checkpoints: names of files, room for them, and their end.

Under a name (of a run and a job) a directory lies on the node until the job has succeeded, so that
the next attempt there goes on from it; an attempt without a name has one of its own that ends with
it. Each rank writes ``step-S.rank-R.pt``, aside and then renamed, when its part of a step is whole.
Ranks of a gang may be killed between two of those, so a gang keeps as many steps as surely have one
that all ranks have written. ``NIGHTGRID_CHECKPOINTS`` names another place than the node's cache,
such as one that nodes share; a folder of this user is made there for them. Where they share it, an
attempt that a driver has given up may still write on a node that was cut off: each rank holds a
lock on its part, and where one does not get it all of them begin anew, in directories that end with
the attempt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.cache import cache_root, try_lock
from workloads.owned_directory import abandoned_directories, make_owned_directory

#: A directory that has the folder of checkpoints, instead of the node's cache.
VARIABLE = "NIGHTGRID_CHECKPOINTS"
#: Days after which checkpoints of jobs that nobody tried again are removed by the next training.
KEPT_DAYS = 14
#: Seconds for the processes of an attempt that was killed to be gone, and their locks with them.
DYING_S = 10.0
_PREFIX = "checkpoints-"
_FOLDER = "checkpoints"
_FOLDER_ELSEWHERE = "nightgrid-checkpoints-{user}"
#: Its name in earlier versions, for all users: what is old there is still removed.
_FOLDER_BEFORE = "nightgrid-checkpoints"
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
    for folder in (root, root.with_name(_FOLDER_BEFORE)):
        _remove_old(folder, directory)
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

    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


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
    directories: list[Path] = []
    with contextlib.suppress(OSError):  # no such folder, or not to be read
        directories.extend(root.iterdir())
    for directory in directories:
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
