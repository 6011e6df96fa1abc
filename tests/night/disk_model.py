"""A disk in memory, put in the place of ``orchestrator.store.disk``.

It remembers what a power failure would leave: of a file, the content that was last synced, or some
beginning of what came after; of a directory, the names that were last synced and some of the
changes since. It gets full, and bits on it flip. Every call is a moment at which a driver may die.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from orchestrator.store.reader import has_rows

NOWHERE = Path("/nowhere")


@dataclass(eq=False)
class Inode:
    """A file: its content now, and as it was last synced."""

    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False)
class Directory:
    """Names now and as last synced, with the changes since, in order."""

    now: dict[str, Inode] = field(default_factory=dict)
    synced: dict[str, Inode] = field(default_factory=dict)
    changes: list[tuple[str, str, Inode | None]] = field(default_factory=list)

    def change(self, source: str, target: str, inode: Inode | None) -> None:
        self.changes.append((source, target, inode))
        apply(self.now, source, target, inode)


def apply(names: dict[str, Inode], source: str, target: str, inode: Inode | None) -> None:
    if source:
        names.pop(source, None)
    if target and inode is not None:
        names[target] = inode


class SimulatedDisk:
    """The functions of ``store.disk``; ``step`` is called before each that changes something."""

    def __init__(self, random: Random, step: Callable[[], None]) -> None:
        self.random, self.step = random, step
        self.directories: dict[Path, Directory] = {}
        self.room: int | None = None  # bytes left; None: plenty
        self.flipped: set[str] = set()  # names of files in which a bit has flipped
        self._open: dict[int, tuple[Inode, Path]] = {}
        self._handles = 0

    def create(self, path: Path) -> int:
        self.step()
        directory = self._directory(path.parent)
        inode = directory.now.get(path.name)
        if inode is None:
            inode = Inode()
            directory.change("", path.name, inode)
        inode.content.clear()
        self._handles += 1
        self._open[self._handles] = inode, path
        return self._handles

    def create_new(self, path: Path) -> int:
        if path.name in self._directory(path.parent).now:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        return self.create(path)

    def has_name(self, handle: int, path: Path) -> bool:
        return self._directory(path.parent).now.get(path.name) is self._open[handle][0]

    def write(self, handle: int, data: bytes | memoryview) -> int:
        (inode, path), part = self._open[handle], bytes(data)
        try:
            self.step()
        except BaseException:  # death comes in the middle of it
            inode.content += part[: self.random.randrange(len(part) + 1)]
            raise
        if self.room is not None and path.is_relative_to(NOWHERE):
            if part and not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            part = part[: self.room]
            self.room -= len(part)
        inode.content += part
        return len(part)

    def sync(self, handle: int) -> None:
        self.step()
        inode, _ = self._open[handle]
        inode.synced = bytes(inode.content)

    def close(self, handle: int) -> None:
        del self._open[handle]

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        directory = self._directory(source.parent)
        if source.name not in directory.now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        inode = directory.now[source.name]
        if source.parent == target.parent:
            directory.change(source.name, target.name, inode)
        else:
            self._directory(target.parent).change("", target.name, inode)
            directory.change(source.name, "", None)

    def remove(self, path: Path) -> None:
        self.step()
        directory = self._directory(path.parent)
        if path.name not in directory.now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if self.room is not None:
            self.room += len(directory.now[path.name].content)
        directory.change(path.name, "", None)

    def make_directory(self, path: Path) -> None:
        """Directories last at once: they are few, made before any row."""
        for each in (*reversed(path.parents), path):
            self.directories.setdefault(each, Directory())

    def sync_directory(self, directory: Path) -> None:
        self.step()
        found = self._directory(directory)
        found.synced = dict(found.now)
        found.changes.clear()

    def names(self, directory: Path) -> list[str]:
        return list(self._directory(directory).now)

    def read(self, path: Path, limit_bytes: int = 0, *, follow: bool = True) -> bytes:
        try:
            data = bytes(self._directory(path.parent).now[path.name].content)
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        assert not limit_bytes or len(data) <= limit_bytes
        return data

    def is_there(self, path: Path) -> bool:
        if path in self.directories:
            return True
        parent = self.directories.get(path.parent)
        return parent is not None and path.name in parent.now

    def may_be_ordinary(self, path: Path) -> bool:
        return path not in self.directories

    def _directory(self, path: Path) -> Directory:
        try:
            return self.directories[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None

    def lose_power(self) -> None:
        """Of what was not synced, some is there and some is not."""
        self._open.clear()
        kept: dict[Inode, bytearray] = {}
        for directory in self.directories.values():
            names = dict(directory.synced)
            # A journal keeps changes up to some moment; a file system without one, any of them.
            in_order = self.random.random() < 0.5
            until = self.random.randint(0, len(directory.changes))
            for number, change in enumerate(directory.changes):
                if number < until if in_order else self.random.random() < 0.5:
                    apply(names, *change)
            directory.now, directory.synced = names, dict(names)
            directory.changes.clear()
            for inode in names.values():
                if inode not in kept:
                    kept[inode] = self._after_power_failure(inode)
        for inode, content in kept.items():
            inode.content, inode.synced = content, bytes(content)

    def _after_power_failure(self, inode: Inode) -> bytearray:
        if bytes(inode.content) == inode.synced:
            return bytearray(inode.synced)
        # What was appended to after a sync keeps what it had then.
        grown = inode.content.startswith(inode.synced)
        least = len(inode.synced) if grown else 0
        part = inode.content[: self.random.randint(least, len(inode.content))]
        if self.random.random() < 0.3:  # its length was kept, and nothing of it had been written
            part += bytes(len(inode.content) - len(part))
        return bytearray(inode.synced) if self.random.random() < 0.3 else bytearray(part)

    def flip_bits(self, directory: Path, count: int) -> None:
        now = self.directories[directory].now
        names = sorted(name for name in now if has_rows(name) and now[name].content)
        for name in self.random.sample(names, min(count, len(names))):
            inode = self.directories[directory].now[name]
            at = self.random.randrange(len(inode.content))
            inode.content[at] ^= 1 << self.random.randrange(8)
            inode.synced = bytes(inode.content)
            self.flipped.add(name)
