"""Directories that say which process made them, so that only abandoned ones of ours are removed.

A name proves nothing: people call their directories what they like, and a process id means another
process in another container. So a marker file is written when a directory is made. It names the
process with its start time, since process ids come back, the pid namespace in which that id has a
meaning, and the boot. Whatever has no such marker, or one from another namespace or boot, is left
alone: nobody here can know whether it is still in use.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workloads.process_stat import started_ticks
from workloads.util import files

MARKER = ".nightgrid-owner.json"
_FORMAT = 1
_LONGEST_MARKER_BYTES = 4096
_PID_LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process of one boot, not to be mistaken for a later one with its number."""

    pid: int
    started_ticks: int  # since boot, as the kernel counts
    pid_namespace: str
    boot_id: str

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """This process; namespace and boot are empty where there is no ``/proc``."""
        pid_namespace = boot_id = ""
        with contextlib.suppress(OSError):
            pid_namespace = os.readlink("/proc/self/ns/pid")
        with contextlib.suppress(OSError):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            pid=os.getpid(),
            started_ticks=started_ticks(os.getpid()) or 0,
            pid_namespace=pid_namespace,
            boot_id=boot_id,
        )

    def is_gone(self) -> bool:
        """True if the process has certainly ended: false too where that cannot be seen from here,
        in another container or after another boot."""
        here = ProcessIdentity.of_this_process()
        same = (self.pid_namespace, self.boot_id) == (here.pid_namespace, here.boot_id)
        if not (same and here.pid_namespace and here.boot_id):
            return False
        return started_ticks(self.pid) != self.started_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedDirectory:
    """A directory with a valid marker of this user."""

    path: Path
    process: ProcessIdentity  # which made it
    owner: str  # on whose behalf, in the maker's own words

    @property
    def is_abandoned(self) -> bool:
        """True if the process that made it has certainly ended."""
        return self.process.is_gone()

    def remove(self) -> None:
        """Remove it with all that is in it, the marker last: a removal that is cut short can be
        gone on with. What cannot be removed stays, with the marker."""
        if self.path.is_symlink():
            return
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.path)):
                if entry.name == MARKER:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
            if os.listdir(self.path) == [MARKER]:
                os.unlink(self.path / MARKER)
                os.rmdir(self.path)


def make_owned_directory(prefix: str, base: Path, owner: str = "") -> OwnedDirectory:
    """Make a directory for this user alone (mode 0700), with a marker.

    Raises:
        OSError: it cannot be made or its marker cannot be written.
    """
    process = ProcessIdentity.of_this_process()
    path = Path(tempfile.mkdtemp(prefix=f"{prefix}{process.pid}-", dir=base))
    marker = {"format": _FORMAT, **asdict(process), "owner": owner}
    try:
        with os.fdopen(files.create(path / MARKER, 0o600), "w", encoding="utf-8") as file:
            json.dump(marker, file)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return OwnedDirectory(path=path, process=process, owner=owner)


def abandoned_directories(prefix: str, base: Path) -> list[OwnedDirectory]:
    """The directories in ``base`` that processes of this user, of this pid namespace and boot, made
    with this prefix and did not live to remove."""
    found = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(base) if name.startswith(prefix)]
        for name in sorted(names):
            directory = owned_directory(base / name)
            if directory is not None and directory.is_abandoned:
                found.append(directory)
    return found


def owned_directory(path: Path) -> OwnedDirectory | None:
    """The directory at ``path`` if it is one of this user's, no symbolic link, with a marker that
    says whose it is; None otherwise."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, ValueError):
        return None
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            return None
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a writer
        marker = os.open(MARKER, flags, dir_fd=directory)
        try:
            status = os.fstat(marker)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            content = os.read(marker, _LONGEST_MARKER_BYTES + 1)
        finally:
            os.close(marker)
    except OSError:
        return None
    finally:
        os.close(directory)
    return _parsed(path, content)


def _parsed(path: Path, content: bytes) -> OwnedDirectory | None:
    """Owner that a marker names; None if it is not one of ours."""
    if len(content) > _LONGEST_MARKER_BYTES:
        return None
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    numbers: list[Any] = [values.get(name) for name in ("format", "pid", "started_ticks")]
    if any(type(number) is not int for number in numbers):  # true is an integer too
        return None
    written, pid, ticks = numbers
    if written != _FORMAT or not 0 < pid < _PID_LIMIT or ticks < 1:
        return None
    texts = [values.get(name) for name in ("pid_namespace", "boot_id", "owner")]
    pid_namespace, boot_id, owner = (text if isinstance(text, str) else None for text in texts)
    if not pid_namespace or not boot_id or owner is None:
        return None
    process = ProcessIdentity(
        pid=pid, started_ticks=ticks, pid_namespace=pid_namespace, boot_id=boot_id
    )
    return OwnedDirectory(path=path, process=process, owner=owner)
