"""The id of a run belongs to one directory: a copy is another run, a move is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from measurements import row
from odd_files import a_pipe, unreadable

from orchestrator.core.errors import StoreError, StoreLocked
from orchestrator.store import files as run_files
from orchestrator.store.identity import ids_at
from orchestrator.store.store import Store


def open_by_driver(run: Path) -> Store:
    with Store(run.parent, run.name) as store:
        store.append(row())
    return store


def copy(run: Path, name: str) -> Path:
    target = run.with_name(name)
    shutil.copytree(run, target, symlinks=True)
    (target / run_files.LOCK).unlink(missing_ok=True)
    return target


def test_a_copy_gets_an_id_of_its_own_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "night"
    old = open_by_driver(run).run_id
    copied = open_by_driver(copy(run, "copy"))
    assert copied.run_id != old and ids_at(copied.path) == (copied.run_id, old)
    note = copied.note
    assert f"was copied from {run}" in note
    again = open_by_driver(run)
    assert again.run_id == old and again.note == ""
    assert open_by_driver(copied.path).run_id == copied.run_id


def test_a_copy_of_a_run_that_is_driven_says_whose_lock_it_has(tmp_path: Path) -> None:
    with Store(tmp_path, "night"):
        shutil.copytree(tmp_path / "night", tmp_path / "copy")
        with pytest.raises(StoreLocked, match=r"copied.*delete .*copy/driver\.lock"):
            open_by_driver(tmp_path / "copy")
        with pytest.raises(StoreLocked) as refusal:
            open_by_driver(tmp_path / "night")
        assert "copied" not in str(refusal.value)


def test_a_moved_run_keeps_its_id(tmp_path: Path) -> None:
    """On another host it cannot be told from a copy."""
    run = tmp_path / "night"
    old = open_by_driver(run).run_id
    run.rename(tmp_path / "moved")
    assert open_by_driver(tmp_path / "moved").run_id == old
    file = tmp_path / "moved" / run_files.RUN_ID
    run_id, detail = file.read_text().splitlines()
    there = {**json.loads(detail), "host": "node-7"}
    file.write_text(f"{run_id}\n{json.dumps(there)}\n")
    assert open_by_driver(tmp_path / "moved").run_id == old  # the same path: a shared directory
    file.write_text(f"{run_id}\n{json.dumps(there)}\n")
    (tmp_path / "moved").rename(run)
    assert open_by_driver(run).run_id != old


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("../../etc"),
        lambda path: path.write_text("0123456789ab\n"),
        lambda path: path.write_text("0123456789ab\n{"),
        lambda path: path.write_text(
            '0123456789ab\n{"path": "/x\\u0000", "host": "", "former": []}'
        ),
        lambda path: path.write_text('0123456789ab\n{"path": 5, "host": "", "former": []}'),
        lambda path: path.write_text("0123456789ab\n" + "[" * 50_000),
        lambda path: path.mkdir(),
        a_pipe,
    ],
    ids=["bytes", "path", "alone", "json", "nul", "number", "deep", "directory", "pipe"],
)
def test_what_is_no_id_is_set_aside(tmp_path: Path, make: Callable[[Path], object]) -> None:
    run = tmp_path / "night"
    run.mkdir()
    make(run / run_files.RUN_ID)
    store = open_by_driver(run)
    note = store.note
    assert "held no run id" in note and len(store.run_id) == 12
    assert (store.quarantine_path / run_files.RUN_ID).exists()


def test_an_id_that_cannot_be_read_for_a_moment_is_kept(tmp_path: Path) -> None:
    """With a new one the run would not find the processes it left."""
    old = open_by_driver(tmp_path / "night").run_id
    with (
        unreadable(lambda path: path.name == run_files.RUN_ID),
        pytest.raises(StoreError, match="Try again"),
    ):
        open_by_driver(tmp_path / "night")
    assert open_by_driver(tmp_path / "night").run_id == old
