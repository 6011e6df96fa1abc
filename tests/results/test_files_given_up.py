"""Files that cannot be read or removed for the moment double no row and lose none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from measurements import note, row

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, paths
from orchestrator.results.store import Store


def numbers(store: Store) -> list[int]:
    """The rows that the store shows, by their batch size."""
    return sorted((each.batch_size or 0) - 1 for each in store.measurements(samples=False))


def away(*_: Path) -> None:
    """A file system that is away."""
    raise OSError(errno.EIO, "Input/output error")


def unread(monkeypatch: pytest.MonkeyPatch, begins: str) -> None:
    """Let files whose names begin so not be read, for want of descriptors."""
    read = disk.read

    def fail(path: Path, *arguments: Any, **options: Any) -> bytes:
        if path.name.startswith(begins):
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path, *arguments, **options)

    monkeypatch.setattr(disk, "read", fail)


def test_nothing_is_compacted_beside_a_file_that_may_stand_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction was cut short: the files that it replaced are there, and it cannot be read."""
    with Store.open(tmp_path, "night") as store:
        for number in range(2):
            store.append(row(number))
            store.to_parquet()
        with monkeypatch.context() as broken, pytest.raises(OSError, match="Input"):
            broken.setattr(disk, "remove", away)
            store.compact()
        store.append(row(2))
        with monkeypatch.context() as broken:
            unread(broken, "compacted-")
            with pytest.raises(StoreError, match=r"cannot be told now: .*compacted-2-"):
                store.compact()
        assert sum(name.startswith("compacted") for name in os.listdir(store.tables_path)) == 1
        assert numbers(store) == [0, 1, 2]
        store.compact()
        assert numbers(store) == [0, 1, 2] and len(os.listdir(store.tables_path)) == 1


def test_a_file_that_was_given_up_is_gone_before_another_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next driver would name it, and plain readers see its rows twice. While it cannot be
    removed there is no other."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0))
        with monkeypatch.context() as broken:
            broken.setattr(disk, "rename", away)
            broken.setattr(disk, "remove", away)
            with pytest.raises(StoreError):
                store.to_parquet()
            store.append(row(1))
            with pytest.raises(StoreError, match="cannot be removed"):
                store.to_parquet()
        assert numbers(store) == [0, 1]
        store.to_parquet()
        (name,) = os.listdir(store.tables_path)
        assert name.startswith("rows-2-1-") and numbers(store) == [0, 1]


def test_what_was_interrupted_is_not_forgotten_for_want_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of attempts stays where it is, and the driver that can read it makes their rows."""
    with Store.open(tmp_path, "night") as store:
        store.begin(note(1))
    with monkeypatch.context() as broken:
        unread(broken, paths.BEGUN)
        with pytest.raises(StoreError, match=r"were interrupted cannot be told now: .*Too many"):
            store.__enter__()
    with store:
        assert store.interrupted == (note(1).attempt_id,)
