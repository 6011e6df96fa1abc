"""The Arrow schema: exact round trip, documented columns, versions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from measurement_strategies import measurements
from measurements import row, sample

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store import schema as schema_module
from orchestrator.store.codec import from_table, to_table
from orchestrator.store.column_docs import COLUMN_DOCS, NESTED_DOCS
from orchestrator.store.schema import SCHEMA_VERSION, column_names, schema
from tools.documents.schema import markdown
from workloads.base import Item, MeasureSettings, Sample


@settings(max_examples=60, deadline=None)
@given(measurements)
def test_round_trip_is_exact(measurement: Measurement) -> None:
    table = to_table([measurement, row()])
    assert table.schema.equals(schema(), check_metadata=True)
    assert from_table(table) == [measurement, row()]


def test_nothing_but_raw_columns_is_lost_without_them() -> None:
    table = to_table([row()]).select(column_names(raw=False))
    assert from_table(table) == [dataclasses.replace(row(), samples=(), items=())]


def test_every_field_is_described_and_every_description_has_a_field() -> None:
    columns = {f.name for f in dataclasses.fields(Measurement)} - {"metrics"}
    columns |= {f.name for f in dataclasses.fields(Metrics)}
    assert set(schema().names) == columns == set(COLUMN_DOCS)
    for record in (Sample, Item, MeasureSettings):
        assert set(NESTED_DOCS[record.__name__]) == {f.name for f in dataclasses.fields(record)}
    for column in schema():
        assert column.metadata[b"description"], column.name


def test_names_of_seconds_and_bytes_agree_with_their_units() -> None:
    for docs in (COLUMN_DOCS, *NESTED_DOCS.values()):
        for name, (unit, *_) in docs.items():
            if name.endswith("_per_s"):
                assert unit in ("tokens/s", "1/s"), name
            elif name.endswith("_s"):
                assert unit == "s", name
            elif name.endswith("_bytes"):
                assert unit == "bytes", name


def test_text_that_is_not_unicode_is_escaped() -> None:
    broken = b"error \xff\xfe end".decode("utf-8", "surrogateescape")
    (back,) = from_table(to_table([row(failure_tail=broken)]))
    assert back.failure_tail == "error \\udcff\\udcfe end"


def test_a_newer_table_is_refused() -> None:
    newer = to_table([row()]).replace_schema_metadata(
        {b"nightgrid.schema_version": str(SCHEMA_VERSION + 1).encode()}
    )
    with pytest.raises(SchemaMismatch, match=f"version {SCHEMA_VERSION + 1}.*up to"):
        from_table(newer)


def test_a_table_of_something_else_is_refused() -> None:
    with pytest.raises(StoreError, match="no schema version"):
        from_table(pa.table({"x": [1]}))
    stranger = pa.table({"x": [1]}).replace_schema_metadata({b"nightgrid.schema_version": b"1"})
    with pytest.raises(StoreError, match="does not hold measurements"):
        from_table(stranger)


def test_an_older_table_is_filled_up_and_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    old = to_table([row()]).drop_columns(["details", "recorded_at"])
    monkeypatch.setattr(schema_module, "SCHEMA_VERSION", 2)

    def to_two(table: pa.Table) -> pa.Table:
        at = table.column_names.index("reason")
        return table.set_column(at, "reason", pa.array(["rewritten"]))

    monkeypatch.setitem(schema_module.UPGRADES, 1, to_two)
    (back,) = from_table(old)
    assert back.reason == "rewritten"
    assert back.details == {} and back.recorded_at is None


def test_nested_fields_that_were_added_since_are_filled_up() -> None:
    taken = ((0, sample(communication_s=0.5)), (1, sample(step_s=(0.1, 0.2))))
    made = row(samples=taken, measure=MeasureSettings(warmup_limit_s=7.0))
    table = to_table([made] * 3)
    for name, gone in (("measure", "warmup_limit_s"), ("samples", "communication_s")):
        at, kind = table.column_names.index(name), table.schema.field(name).type
        nested = pa.types.is_list(kind)
        record = pa.struct([f for f in (kind.value_type if nested else kind) if f.name != gone])
        values = pa.array(table.column(name).to_pylist(), pa.list_(record) if nested else record)
        table = table.set_column(at, name, values)
    samples = tuple((rank, dataclasses.replace(s, communication_s=None)) for rank, s in taken)
    older = row(samples=samples)
    assert from_table(table) == [older] * 3
    assert from_table(table.slice(1, 1)) == [older]


def test_columns_of_a_later_program_are_ignored() -> None:
    table = to_table([row()]).append_column("afterthought", pa.array([1]))
    assert from_table(table) == [row()]


def test_the_documentation_is_up_to_date() -> None:
    path = Path(__file__).parents[2] / "docs" / "schema.md"
    assert path.read_text(encoding="utf-8") == markdown()
