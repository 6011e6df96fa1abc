"""Rows on another disk come home once, and only while it can be told what is there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from measurements import row

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, paths
from orchestrator.results.spilled import SpilledRows
from orchestrator.results.store import Store


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one directory for rows that find no room."""
    place = tmp_path / "elsewhere"
    monkeypatch.setattr(paths, "spill_directories", lambda _: [place])
    return place


def failing(monkeypatch: pytest.MonkeyPatch, bad: Path) -> None:
    """Have a file fail from the second time it is read: the first is the look for what is torn."""
    read, seen = disk.read, [Path("nothing")]

    def fail(path: Path, *arguments: Any, **options: Any) -> bytes:
        if path == bad and (bad in seen or bad.suffix != ".parquet"):
            raise OSError(errno.EIO, "Input/output error")
        seen.append(path)
        return read(path, *arguments, **options)

    monkeypatch.setattr(disk, "read", fail)


def test_nothing_comes_home_while_a_file_of_the_run_cannot_be_read(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the row already. The next driver that can read it knows."""
    rows = [row(1), row(2)]
    with monkeypatch.context() as dead, Store.open(tmp_path, "night") as store:
        for each in rows:
            store.spill(each)
        dead.setattr(SpilledRows, "forget", lambda *_: None)
        store.append(*rows)
    (file,) = store.tables_path.iterdir()
    with monkeypatch.context() as broken:
        failing(broken, file)
        with pytest.raises(StoreError, match=r"cannot be told now: .*Try again"):
            store.__enter__()
        assert len(list(elsewhere.iterdir())) == 2
    with store:
        assert store.rescued == 0 and len(store.measurements()) == 2
    assert not elsewhere.exists()


def test_a_row_elsewhere_that_cannot_be_read_is_not_taken_for_lost(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is not gone on with before: another row would be written for its attempt."""
    with Store.open(tmp_path, "night") as store:
        place = Path(str(store.spill(row(1))))
    with monkeypatch.context() as broken:
        failing(broken, place)
        with pytest.raises(StoreError, match=r"cannot be read: Input/output error\. Try again"):
            store.__enter__()
    with store:
        assert store.rescued == 1
    assert store.measurements() == [row(1)]
