"""Compaction without records: the same rows, the very same file, and nothing unsound in it."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
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
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    path = store.tables_path / file_name(1, 1, data)
    path.write_bytes(data)
    return path


def test_an_older_table_gets_the_columns_of_today(tmp_path: Path) -> None:
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
    with Store.open(tmp_path, "night") as store:
        store.append(row(1))
        store.to_parquet()
        store.append(row(2, recorded_at=None))
        path = store.compact()
    times = pq.ParquetFile(str(path)).read()["recorded_at"].to_pylist()
    recorded_at = row(1).recorded_at
    assert recorded_at is not None
    assert times == [None, datetime.fromtimestamp(recorded_at, timezone.utc)]
