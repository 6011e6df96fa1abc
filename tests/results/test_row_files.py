"""Rows whose append failed, in any company afterwards: none is lost, and none is two."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measurements import row

from orchestrator.core.errors import StoreError
from orchestrator.results import disk
from orchestrator.results.lock import RunLock
from orchestrator.results.store import Store


def away(*_: object) -> None:
    raise OSError(errno.EIO, "away")


def batch_sizes(store: Store) -> list[int]:
    return sorted(each.batch_size or 0 for each in store.measurements(samples=False))


def fail_to_append(store: Store, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Append rows that cannot be synced, nor taken back: readers see them."""
    with monkeypatch.context() as broken, pytest.raises(StoreError):
        broken.setattr(disk, "sync", away)
        broken.setattr(disk, "truncate", away)
        store.append(*(row(number) for number in numbers))


@pytest.mark.parametrize("first", [(), (9,)], ids=["first", "later"])
def test_rows_of_a_record_that_stands_may_come_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[int, ...]
) -> None:
    """The record is cut off its log before they do."""
    with Store.open(tmp_path, "night") as store:
        for number in first:
            store.append(row(number))
        fail_to_append(store, monkeypatch, 0, 1, 2)
        store.append(row(1))
        store.append(row(2), row(3))
        store.append(row(0))
        assert batch_sizes(store) == sorted([1, 2, 3, 4, *(number + 1 for number in first)])
    assert batch_sizes(store) == sorted([1, 2, 3, 4, *(number + 1 for number in first)])


def test_rows_of_a_record_that_became_parquet_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read as it stands, and the file of it is safe."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(9))  # else its log, which has nothing else, is removed
        fail_to_append(store, monkeypatch, 0, 1)
        store.to_parquet()
        store.append(row(1), row(2))
        store.append(row(0))
        assert batch_sizes(store) == [1, 2, 3, 10]


def test_a_file_whose_name_may_be_lost_makes_no_rows_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are in it are refused until its directory is synced."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(9))
        fail_to_append(store, monkeypatch, 0, 1)
        with monkeypatch.context() as broken:
            broken.setattr(disk, "sync_directory", away)
            with pytest.raises(StoreError):
                store.to_parquet()
            with pytest.raises(StoreError, match="cannot write"):
                store.append(row(0))
        store.append(row(0))
        store.append(row(1), row(2))
        assert batch_sizes(store) == [1, 2, 3, 10]


def test_rows_are_refused_while_the_record_with_them_cannot_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are not."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(9))  # else its log, which has nothing else, is removed
        fail_to_append(store, monkeypatch, 0, 1)
        with monkeypatch.context() as broken:
            broken.setattr(disk, "truncate", away)
            with pytest.raises(StoreError, match="cannot cut"):
                store.append(row(1))
            store.append(row(2))
            store.append(row(0), row(1))  # the same record again
        assert batch_sizes(store) == [1, 2, 3, 10]


def test_rows_are_written_after_a_record_of_them_failed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time it is taken back, which says nothing of the first."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with Store.open(tmp_path, "night") as store:
        store.append(row(9))
        for call, fails in (("sync", away), ("write", full)):
            with monkeypatch.context() as broken, pytest.raises(StoreError):
                broken.setattr(disk, call, fails)
                store.append(row(0), row(1))
        store.append(row(0))
        assert batch_sizes(store) == [1, 10]
    assert batch_sizes(store) == [1, 10]


def test_rows_of_a_record_that_stands_twice_may_come_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off both its logs before they do."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(9))
        fail_to_append(store, monkeypatch, 0, 1)
        fail_to_append(store, monkeypatch, 0, 1)
        store.append(row(0))
        store.append(row(1))
        assert batch_sizes(store) == [1, 2, 10]
    assert batch_sizes(store) == [1, 2, 10]


def test_files_that_do_not_read_back_are_one_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is the same though each has another name; no row is lost."""
    read, said = disk.read, set[str]()

    def rotten(path: Path, *arguments: Any, **options: Any) -> bytes:
        return read(path, *arguments, **options) + b"x" * (path.suffix == ".parquet")

    with Store.open(tmp_path, "night") as store:
        for number in range(2):
            store.append(row(number))
            with monkeypatch.context() as broken, pytest.raises(StoreError) as failure:
                broken.setattr(disk, "read", rotten)
                store.to_parquet()
            said.add(str(failure.value))
        assert batch_sizes(store) == [1, 2]
    (message,) = said
    assert "does not read back as written" in message


def test_a_record_after_which_the_lock_could_not_be_looked_at_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are safe once the lock is seen to be ours."""
    still_mine: Callable[[RunLock], None] = RunLock.still_mine
    looks = iter([True, False])

    def look(lock: RunLock) -> None:
        if not next(looks, True):
            raise StoreError("cannot look")
        still_mine(lock)

    with Store.open(tmp_path, "night") as store:
        with monkeypatch.context() as broken, pytest.raises(StoreError, match="cannot look"):
            broken.setattr(RunLock, "still_mine", look)
            store.append(row(0), row(1))
        store.append(row(0))
        store.append(row(1), row(2))
        assert batch_sizes(store) == [1, 2, 3]


def test_a_directory_named_like_a_file_of_rows_keeps_nothing_from_parquet(tmp_path: Path) -> None:
    """Somebody else made it while the run went on: it is named, and never may be rows."""
    with Store.open(tmp_path, "night") as store:
        (store.tables_path / "foreign.parquet").mkdir()
        store.append(row(0))
        store.to_parquet()
        store.append(row(1))
        store.compact()
        (damage,) = store.read().damaged
        assert damage.path.name == "foreign.parquet" and not damage.passing
    assert batch_sizes(store) == [1, 2]
