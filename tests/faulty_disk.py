"""A disk that fails and kills at random moments, and drivers of one run that write on it.

Each call of ``store/disk.py`` may raise an error, before or after it has done its work, or end
its driver there, as SIGKILL would; a write may be torn. All is drawn from one seed, which is a
history that replays.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from measurements import journal_row, row

from orchestrator.core.errors import StoreError
from orchestrator.core.job import State
from orchestrator.store import disk
from orchestrator.store import store as store_module
from orchestrator.store.lock import RunLock
from orchestrator.store.store import Store

#: The calls that may fail.
CALLS = (
    *("create", "create_new", "write", "sync", "rename", "remove"),
    *("sync_directory", "names", "read", "make_directory"),
)
_WRITING = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ESTALE)
_READING = (errno.EMFILE, errno.ESTALE, errno.ENOMEM)  # others may be damage for good
#: Of these an error can come although the work was done.
_LATE = {"sync", "rename", "sync_directory", "write"}


class Killed(BaseException):
    """The driver is dead: nothing of it may catch this."""


@dataclass
class FaultyDisk:
    """The disk with its faults, at these rates a call while ``on``."""

    random: Random
    errors: float
    kills: float
    on: bool = False
    log: list[str] = field(default_factory=list)  # of faults and acts, to explain a failure

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(disk, name, self._faulty(name, getattr(disk, name)))

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def _faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            drawn = self.random.random() if self.on else 1.0
            if drawn < self.kills:
                self._dies(name, real, arguments, more)
            if drawn < self.kills + self.errors:
                late = name in _LATE and self.random.random() < 0.3
                number = self.random.choice(_READING if name == "read" else _WRITING)
                self.log.append(f"{errno.errorcode[number]} at {name}{' done' if late else ''}")
                if late:
                    real(*arguments, **more)
                raise OSError(number, os.strerror(number), str(arguments[0]))
            return real(*arguments, **more)

        return call

    def _dies(self, name: str, real: Callable[..., Any], arguments: Any, more: Any) -> None:
        """End the driver before the call, after it, or within a write."""
        after = self.random.random() < 0.5
        self.log.append(f"killed at {name}{' done' if after else ''}")
        if after:
            real(*arguments, **more)
        elif name == "write" and len(arguments[1]):
            handle, data = arguments
            if some := self.random.randrange(len(data)):
                real(handle, memoryview(data)[:some])
        raise Killed


class Drivers:
    """Drivers of one run, one after the other, and the rows that they were told are safe."""

    def __init__(self, directory: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        self.disk = FaultyDisk(
            self.random,
            errors=self.random.choice([0.0, 0.01, 0.03, 0.08]),
            kills=self.random.choice([0.003, 0.01, 0.03]),
        )
        self.results = directory / "results"
        self.results.mkdir()
        self.acknowledged: set[int] = set()
        self._next = 0
        patch.setattr(store_module, "COMPACT_FROM", self.random.choice([3, 6, 200]))
        self.disk.put_in_place(patch)

    def drive(self) -> None:
        lock = RunLock(self.results / "night")
        store = Store(self.results, "night", lock=lock)
        try:
            with self.disk.faults(), store:
                for _ in range(self.random.randrange(1, 14)):
                    if not self._act(store):
                        break
        except (Killed, StoreError):
            lock.release()  # as the kernel does it

    def check(self) -> None:
        """No row that a driver was told is safe is missing, and none is there twice."""
        with Store(self.results, "night") as store:
            self._look(store)
        self._look(Store(self.results, "night"))

    def _look(self, store: Store) -> None:
        found = store.measurements(samples=False)
        rows = Counter((each.batch_size or 0) - 1 for each in found if each.final)
        lost = Counter(each.attempt_id for each in found if each.state is State.LOST)
        told = f"after {self.disk.log[-30:]}"
        assert not {**(rows - Counter(set(rows))), **(lost - Counter(set(lost)))}, told
        assert not self.acknowledged - rows.keys(), told

    def _act(self, store: Store) -> bool:
        act = self.random.random()
        if act < 0.7:
            return self._append(store)
        with contextlib.suppress(StoreError, OSError):
            store.to_parquet() if act < 0.93 else store.compact()
        return True

    def _append(self, store: Store) -> bool:
        count = self.random.randrange(1, 4)
        numbers = range(self._next, self._next + count)
        self._next += count
        rows = [row(number) for number in numbers]
        if self.random.random() < 0.5:
            with contextlib.suppress(StoreError):
                store.begin(*map(journal_row, numbers))
        for _ in range(self.random.randrange(1, 4)):
            with contextlib.suppress(StoreError):
                store.append(*rows)
                self.acknowledged |= {*numbers}
                return True
        return False
