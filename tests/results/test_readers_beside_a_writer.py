"""Readers beside a writer: a listing is of no one moment, and a file may go under their hands."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from measurements import row

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, fragments, scan
from orchestrator.results.bulk import read_lean
from orchestrator.results.store import Store


def numbers(store: Store) -> list[int]:
    """The rows that the store shows, by their batch size."""
    return sorted((each.batch_size or 0) - 1 for each in store.measurements(samples=False))


def test_a_listing_that_misses_a_log_and_the_file_of_it_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of many files is listed in pieces: the file had not come when its place was
    passed, and the log had gone when its own was."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0))
        store.to_parquet()
        stale = scan.row_files(store.tables_path)
        store.append(row(1))
        store.to_parquet()
        real, answers = scan.row_files, [stale]

        def listed(directory: Path) -> set[str]:
            return answers.pop() if answers else real(directory)

        monkeypatch.setattr(scan, "row_files", listed)
        assert numbers(Store.open(tmp_path, "night")) == [0, 1]
        assert not answers


@pytest.mark.parametrize("kind", [".arrows", ".parquet"])
def test_a_file_that_went_while_it_was_read_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On a network file system that is no missing file, but a stale handle."""
    with Store.open(tmp_path, "night") as store:
        for number in range(3):
            store.append(row(number))
            if number < 2:
                store.to_parquet()
        read = disk.read

        def stale(path: Path, *arguments: Any, **options: Any) -> bytes:
            if path.suffix == kind:
                monkeypatch.undo()
                store.compact()
                assert not path.exists()
                raise OSError(errno.ESTALE, "Stale file handle")
            return read(path, *arguments, **options)

        monkeypatch.setattr(disk, "read", stale)
        assert numbers(Store.open(tmp_path, "night")) == [0, 1, 2]
        assert disk.read is read


def test_a_file_that_is_named_after_another_was_made_makes_no_row_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could be neither named nor removed, so its rows went into a file with others; the next
    driver names it. A compaction removes it."""

    def away(*_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Store.open(tmp_path, "night") as store:
        store.append(row(0))
        with monkeypatch.context() as broken, pytest.raises(StoreError):
            broken.setattr(disk, "rename", away)
            broken.setattr(disk, "remove", away)
            store.to_parquet()
        (left,) = store.tables_path.glob(".*.partial")
        data = left.read_bytes()
        store.append(row(1))
        store.to_parquet()
    left.write_bytes(data)  # it could not be removed then either
    with store:
        assert (left.parent / str(fragments.partial_target(left.name))).exists()
        assert numbers(store) == [0, 1]
        assert len(store.history()) == len(read_lean(store).measurements) == 2
        store.compact()
    assert numbers(store) == [0, 1] and len(os.listdir(store.tables_path)) == 1
