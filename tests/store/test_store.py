"""Rows on disk: durable, whole, read by everybody, each exactly once."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from core_cases import a_past_row
from hypothesis import given, settings
from hypothesis import strategies as st
from measurement_strategies import measurements
from measurements import job, numbers, row

from orchestrator.core.errors import SchemaMismatch, StoreError, StoreFull
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.settings import as_declared
from orchestrator.store import disk
from orchestrator.store import files as run_files
from orchestrator.store import store as store_module
from orchestrator.store.codec import to_table
from orchestrator.store.files import default_results_dir, inside_ray_job
from orchestrator.store.reader import file_name
from orchestrator.store.schema import schema
from orchestrator.store.store import Store


def filled(results: Path, count: int) -> Store:
    with Store(results, "night") as store:
        for number in range(count):
            store.append(row(number))
            store.to_parquet()
    return store


# ---------------------------------------------------------------- writing and reading


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    assert Store(tmp_path / "results", "night").measurements() == []
    assert not (tmp_path / "results").exists()
    with Store(tmp_path, "night") as store:
        for number in (2, 0, 1):
            path = store.append(row(number))
            assert path.parent == store.tables_path
    assert store.measurements() == [row(0), row(1), row(2)]
    bare = [dataclasses.replace(row(n), samples=(), items=()) for n in range(3)]
    assert store.measurements(samples=False) == bare


def test_rows_of_a_few_seconds_are_one_file(tmp_path: Path) -> None:
    with Store(tmp_path, "night") as store:
        store.append(row(0))
        log = store.append(row(1), row(2, attempt_number=7), row(3))
        assert os.listdir(store.tables_path) == [log.name]
        assert log == store.append(row(1), row(2, attempt_number=7), row(3))
        assert numbers(store) == [0, 1, 2, 3] and len(store.history()) == 4
        path = store.to_parquet()
        assert path is not None and path.name.startswith("rows-4-7-")
        assert os.listdir(store.tables_path) == [path.name] and store.to_parquet() is None
        assert numbers(store) == [0, 1, 2, 3] and len(store.history()) == 4
        store.append(row(4))
        assert store.compact() is not None and store.compact() is None
    assert numbers(store) == [0, 1, 2, 3, 4] and len(os.listdir(store.tables_path)) == 1


def test_damaged_rows_written_together_use_up_the_attempt_numbers_of_all(tmp_path: Path) -> None:
    """Nobody can tell whose rows they were."""
    with Store(tmp_path, "night") as store:
        store.append(row(1), row(2, attempt_number=7))
    (path,) = store.tables_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with Store(tmp_path, "night") as store:
        ids = [row(1).job_id, row(5).job_id]
        assert store.attempts_set_aside(ids) == dict.fromkeys(ids, 7)


def test_writing_needs_the_lock(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    with pytest.raises(StoreError, match="only by the holder"):
        store.append(row(1))
    with pytest.raises(StoreError, match="only by the holder"):
        store.compact()


def test_history_is_what_planning_needs(tmp_path: Path) -> None:
    as_now = as_declared("text-generation", "transformers", dict(job().parameters))
    with Store(tmp_path, "night") as store:
        store.append(row(1, state=State.FAILED, reason="x", started_at=None, final=False))
        store.append(row(0, attempt_number=2, details={"took": "adapter here-x-1", "other": "y"}))
    shared = {"dataset": "advertisegen-synthetic", "load_s": 1.5}
    shared["parameters"] = tuple(sorted(as_now.items()))
    succeeded = {"took": "adapter here-x-1", "attempt_number": 2, "reason": "measured"}
    failed = {"state": State.FAILED, "final": False, "attempt_number": 1, "reason": "x"}
    assert store.history() == [
        a_past_row(job(batch_size=1), 9.5, recorded_at=1000.0, **shared, **succeeded),
        a_past_row(job(batch_size=2), None, recorded_at=1001.0, **shared, **failed),
    ]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../up", "a/b", "/etc", ".hidden", "a\\b", "a\0b", "a\n", "x" * 200]
)
def test_a_run_name_cannot_leave_the_results_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="run name"):
        Store(tmp_path, name)
    assert Store(tmp_path, "2025-11-21_夜间.c++").path.parent == tmp_path


def test_side_files_stay_beside_the_rows(tmp_path: Path) -> None:
    store = Store(tmp_path, "night")
    assert store.write_file("status.json", "{}") == store.path / "status.json"
    store.write_file("status.json", b'{"done": 1}')
    assert os.listdir(store.path) == ["status.json"]
    assert (store.path / "status.json").read_text() == '{"done": 1}'
    for name in ("../status.json", "a/b", "", ".x"):
        with pytest.raises(StoreError, match=r"file name|is not a file"):
            store.write_file(name, "")


# ---------------------------------------------------------------- compaction


def test_a_big_run_is_compacted_when_it_ends(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "COMPACT_FROM", 4)
    assert len(os.listdir(filled(tmp_path / "small", 3).tables_path)) == 3
    store = filled(tmp_path / "big", 4)
    assert len(os.listdir(store.tables_path)) == 1 and numbers(store) == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError), Store(tmp_path / "big", "night") as store:
        for number in range(4, 9):
            store.append(row(number))
            store.to_parquet()
        raise ZeroDivisionError
    assert len(os.listdir(store.tables_path)) == 6 and numbers(store) == list(range(9))


def test_a_full_disk_at_the_end_does_not_spoil_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "COMPACT_FROM", 2)
    with Store(tmp_path, "night") as store:
        store.append(row(0))
        store.append(row(1))
        fail_writes(monkeypatch, 0, errno.ENOSPC)
    assert numbers(store) == [0, 1]
    assert not (store.path / "driver.lock").exists()


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("length", [0, 1, 4, 5000, -1])
def test_a_truncated_fragment_is_set_aside_by_the_next_writer(tmp_path: Path, length: int) -> None:
    store = filled(tmp_path, 2)
    victim = sorted(store.tables_path.iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:length])
    assert len(store.read().damaged) == 1
    with Store(tmp_path, "night") as store:
        pass
    assert not victim.exists()
    (damage,) = store.read().damaged
    assert damage.path == store.quarantine_path / victim.name and damage.path.exists()
    assert len(store.measurements()) == 1


def test_files_that_are_not_ours_are_reported(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    (store.tables_path / "stranger.parquet").write_bytes(b"PAR1")
    (store.tables_path / "directory.parquet").mkdir()
    (store.tables_path / "link.parquet").symlink_to(tmp_path / "nothing")
    (store.tables_path / "README").write_text("not a table, and nobody's business")
    contents = store.read()
    assert len(contents.measurements) == 1
    assert len(contents.damaged) == 3
    with Store(tmp_path, "night"):
        pass
    assert len(store.read().damaged) == 3
    left = os.listdir(store.tables_path)
    assert "README" in left and len(left) == 2


def plant(store: Store, table: pa.Table) -> None:
    """Put a table into the store under a name that fits it."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    (store.tables_path / file_name(1, 1, data)).write_bytes(data)


def test_rows_of_a_newer_version_stop_the_reader(tmp_path: Path) -> None:
    """Half of a run is not shown as if it were all of it."""
    store = filled(tmp_path, 1)
    newer = {b"nightgrid.schema_version": b"99"}
    plant(store, pa.table({"x": [1]}).replace_schema_metadata(newer))
    with pytest.raises(SchemaMismatch, match="version 99"):
        store.measurements()


# ---------------------------------------------------------------- a full disk


def fail_writes(monkeypatch: pytest.MonkeyPatch, room: int, code: int) -> None:
    real, left = disk.write, room

    def write(handle: int, data: bytes) -> int:
        nonlocal left
        if left == 0:
            raise OSError(code, os.strerror(code))
        done = real(handle, bytes(data)[:left])
        left -= done
        return done

    monkeypatch.setattr(disk, "write", write)


@pytest.mark.parametrize("room", [0, 1, 1000])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, room, code) -> None:
    with Store(tmp_path, "night") as store:
        with monkeypatch.context() as patch:
            fail_writes(patch, room, code)
            with pytest.raises(StoreFull, match="cannot write"):
                store.append(row(0))
            assert os.listdir(store.tables_path) == []
        store.append(row(0))
        with monkeypatch.context() as patch:
            fail_writes(patch, room, code)
            with pytest.raises(StoreFull, match="cannot write"):
                store.append(row(1))
            assert len(os.listdir(store.tables_path)) == 1
        store.append(row(1))
    assert numbers(store) == [0, 1]
    assert store.read().damaged == ()


def test_other_errors_of_the_file_system_are_errors_too(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(StoreError, match="cannot create"), Store(tmp_path / "results", "n"):
        pass


@pytest.mark.parametrize("call", ["names", "remove"])
def test_what_the_file_system_says_at_the_start_is_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = Store(tmp_path, "night")
    with store:
        store.append(row(0))
    real = getattr(disk, call)
    (store.path / run_files.JOURNAL).write_bytes(b"")

    def fail(path: Path) -> object:
        if path not in (store.tables_path, store.path / run_files.JOURNAL):
            return real(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(disk, call, fail)
        with pytest.raises(StoreError, match=r"night.*Input/output"), Store(tmp_path, "night"):
            pass
    with Store(tmp_path, "night") as again:
        assert again.measurements() == [row(0)]


@settings(max_examples=5, deadline=None)
@given(st.lists(st.lists(measurements, min_size=1, max_size=2), min_size=2, max_size=3))
def test_any_rows_are_the_same_afterwards(files: list[list[Measurement]]) -> None:
    with TemporaryDirectory() as directory, Store(Path(directory), "night") as store:
        for rows in files:
            store.append(*rows)
            store.to_parquet()
        before, history = store.measurements(), sorted(map(repr, store.history()))
        path = store.compact()
        assert store.measurements() == before
        assert sorted(map(repr, store.history())) == history  # equal times have no order
        if path is not None:  # else all files were one and the same
            sink = pa.BufferOutputStream()
            pq.write_table(to_table(before), sink)
            both = (pq.ParquetFile(one).read() for one in (path, pa.BufferReader(sink.getvalue())))
            table, expected = (one.replace_schema_metadata(None) for one in both)
            assert table.equals(expected, check_metadata=True)


def test_an_older_table_gets_the_columns_of_today(tmp_path: Path) -> None:
    with Store(tmp_path, "night") as store:
        store.append(row(0))
        older = to_table([row(7)]).drop_columns(["device_name", "throughput_unit", "items"])
        plant(store, older)
        before = store.measurements()
        path = store.compact()
        assert path is not None and len(list(store.tables_path.iterdir())) == 1
        assert store.measurements() == before
        table = pq.ParquetFile(path).read()
        assert table.schema.equals(schema()) and table["throughput_unit"].null_count == 0


# ---------------------------------------------------------------- where results are


@pytest.mark.parametrize(
    ("environment", "directory", "results"),
    [
        ({}, "checkout", Path("results")),
        # Ray throws the working directory away, so the home directory has to do.
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, "x", Path.home() / "nightgrid-results"),
        ({}, "ray/runtime_resources/working_dir_files/_pkg", Path.home() / "nightgrid-results"),
        (
            {"NIGHTGRID_RESULTS": "~/there", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"},
            "x",
            Path.home() / "there",
        ),
    ],
)
def test_where_results_go(tmp_path, monkeypatch, environment, directory, results) -> None:
    for name in ("NIGHTGRID_RESULTS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / directory).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / directory)
    assert default_results_dir() == results
    assert inside_ray_job() == (results != Path("results"))
