"""Compaction without records: the same rows, the very same file, and nothing unsound in it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurement_strategies import measurements
from measurements import row

from orchestrator.core.measurement import Measurement
from orchestrator.store.codec import to_table
from orchestrator.store.reader import file_name
from orchestrator.store.schema import schema
from orchestrator.store.store import Store


@settings(max_examples=5, deadline=None)
@given(st.lists(st.lists(measurements, min_size=1, max_size=3), min_size=2, max_size=4))
def test_any_rows_are_the_same_afterwards(files: list[list[Measurement]]) -> None:
    """Rows, their order, and the columns with types and descriptions are those of ``to_table``."""
    with TemporaryDirectory() as directory, Store.open(Path(directory), "night") as store:
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
            table, expected = (
                pq.ParquetFile(each).read() for each in (path, pa.BufferReader(sink.getvalue()))
            )
            assert table.replace_schema_metadata(None).equals(
                expected.replace_schema_metadata(None), check_metadata=True
            )


def _file(store: Store, table: pa.Table) -> Path:
    """A file of rows with a fitting name, whatever stands in it."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    path = store.tables_path / file_name(1, 1, data)
    path.write_bytes(data)
    return path


def _with(name: str, value: Any) -> pa.Table:
    """Two rows of which the second has another value in a column."""
    table = to_table([row(7), row(8)])
    field = table.schema.field(name)
    values = [*table[name].to_pylist()[:1], value]
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))


def _with_bytes(name: str, value: bytes) -> pa.Table:
    """Two rows of which the second has text that is not UTF-8."""
    table = to_table([row(7), row(8)])
    field = table.schema.field(name)
    texts = pa.array([b"fine", value]).view(pa.string())
    return table.set_column(table.schema.get_field_index(name), field, texts)


_SAMPLE = to_table([row(7)])["samples"].to_pylist()[0][0]

UNSOUND: dict[str, Callable[[], pa.Table]] = {
    "no job": lambda: _with("job_id", None),
    "no such state": lambda: _with("state", "DREAMING"),
    "no such accelerator": lambda: _with("accelerator", "TPU"),
    "a parameter that is not JSON": lambda: _with("parameters", [("prompts", "{")]),
    "a parameter that is a list": lambda: _with("parameters", [("prompts", "[1]")]),
    "a parameter that is nothing": lambda: _with("parameters", [("prompts", None)]),
    "a sample without a time": lambda: _with("samples", [_SAMPLE | {"wall_s": None}]),
    "no sample where one should be": lambda: _with("samples", [_SAMPLE, None]),
    "a time in no calendar": lambda: _with("started_at", 2**62),
    "text that is not UTF-8": lambda: _with_bytes("reason", b"\xff\xfe"),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", UNSOUND.values(), ids=UNSOUND)
def test_what_holds_no_rows_is_not_lost(tmp_path: Path, make: Callable[[], pa.Table]) -> None:
    """A file that a reader refuses stays where it is; the others are compacted and read back."""
    with Store.open(tmp_path, "night") as store:
        for number in range(4):
            store.append(row(number))
            store.to_parquet()
        odd = _file(store, make())
        content = odd.read_bytes()
        path = store.compact()
        assert path is not None
        assert {odd.name, path.name} == {each.name for each in store.tables_path.iterdir()}
        assert odd.read_bytes() == content
        assert store.compact() is None  # with what is left there is nothing to gain
        assert odd.read_bytes() == content
        odd.unlink()
        assert store.measurements() == [row(number) for number in range(4)]


def test_an_older_table_gets_the_columns_of_today(tmp_path: Path) -> None:
    """Columns that a file lacks have their defaults in the compacted one."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0))
        older = to_table([row(7)]).drop_columns(["device_name", "throughput_unit", "items"])
        _file(store, older)
        before = store.measurements()
        path = store.compact()
        assert path is not None and len(list(store.tables_path.iterdir())) == 1
        assert store.measurements() == before
        table = pq.ParquetFile(path).read()
        assert table.schema.equals(schema()) and table["throughput_unit"].null_count == 0


def test_rows_without_a_time_come_first(tmp_path: Path) -> None:
    """As readers have it: the order is that of recording, and one without a time is the oldest."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(1))
        store.to_parquet()
        store.append(row(2, recorded_at=None))
        path = store.compact()
    times = pq.ParquetFile(str(path)).read()["recorded_at"].to_pylist()
    recorded_at = row(1).recorded_at
    assert recorded_at is not None
    assert times == [None, datetime.fromtimestamp(recorded_at, timezone.utc)]
