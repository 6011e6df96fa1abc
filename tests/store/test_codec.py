"""The codec of rows: a measurement, a line of JSON and a table say the same."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from measurement_strategies import measurements
from measurements import from_table, row

from orchestrator.core.errors import StoreError
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store import codec
from orchestrator.store.codec import line_of, row_in, row_of, table_of, to_table
from orchestrator.store.column_docs import COLUMN_DOCS, NESTED_DOCS, RANK
from orchestrator.store.schema import OUT_OF_RANGE, current, fault, faults, schema
from tools.documents.schema import markdown
from workloads.base import Item, MeasureSettings, Sample

ROWS = [
    row(1),
    row(2, image=b"\0png\xff", parameters={"a": 1, "b": True, "c": 1.0, "d": None, "e": "\udcff"}),
    row(3, samples=(), items=(), details={}, versions={}, nodes=(), card_indices=()),
    row(4, samples=((0, sample()), (1, sample(step_s=(0.5, 0.25), loss=math.inf)))),
    row(5, state=State.FAILED, failure_tail="\udc80 裤", final=False, batch_size=None),
    row(6, workload_metrics={"figure": 2.5}, measure=MeasureSettings(time_limit_s=7)),
    row(7, recorded_at=None, started_at=1.0000005, ended_at=None),
]


def through_json(*rows: Measurement) -> list[Measurement]:
    return from_table(table_of([row_in(line_of(row_of(each))) for each in rows]))


@pytest.mark.parametrize(
    "changes",
    [
        *({"load_s": np.float32(1.5)}, {"worker_pid": np.int64(7)}, {"load_s": True}),
        {"samples": ((0, sample(step_s=(0.1, np.float32(0.5)))),)},
        {"items": ((0, Item(index=0, input_tokens=1, output_tokens=-1, latency_s=1.0)),)},
    ],
    ids=str,
)
def test_an_odd_number_costs_no_row(changes: dict[str, Any]) -> None:
    line = line_of(row_of(row(1, **changes)))
    assert "np." not in line.decode()
    table = table_of([row_in(line)])
    assert fault(table) == ""
    (found,) = from_table(table)
    assert (OUT_OF_RANGE in found.details) == ("items" in changes)


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({"worker_pid": "x"}, "worker_pid"),
        ({"worker_pid": 1.5}, "worker_pid"),
        ({"reason": 5}, "reason"),
        ({"emulated": 1}, "emulated"),
        ({"card_indices": ("a",)}, "card_indices"),
        ({"image": "text"}, "image"),
        ({"details": {"a": 1}}, "details"),
        ({"versions": {"a": None}}, "versions"),
        ({"cards": 0}, "cards"),
    ],
)
def test_a_value_that_fits_nowhere_is_named(changes: dict[str, Any], column: str) -> None:
    with pytest.raises(StoreError, match=column):
        row_of(row(1, **changes))
    with pytest.raises(StoreError, match=column):
        to_table([row(1, **changes)])


def test_what_is_null_is_left_out_of_a_line() -> None:
    values = json.loads(line_of(row_of(row(1, load_s=None))))
    assert "load_s" not in values and values["cards"] == 1
    assert None not in values.values()


def test_rows_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = from_table(to_table(ROWS))
    monkeypatch.setattr(codec, "ROWS_TOGETHER", 2)
    assert repr(from_table(to_table(ROWS))) == repr(wanted)
    lean = to_table(ROWS).drop_columns(["samples", "items", "image"])
    for one, other in zip(from_table(lean), wanted, strict=True):
        assert one.samples == () and one.image is None
        for name in ("state", "accelerator", "nodes", "started_at", "cards", "emulated", "threads"):
            assert type(getattr(one, name)) is type(getattr(other, name))


@pytest.mark.parametrize("name", ["job_id", "state", "measure", "cards"])
def test_a_table_without_a_column_that_each_row_has_is_refused(name: str) -> None:
    with pytest.raises(StoreError, match=name):
        from_table(to_table(ROWS).drop_columns([name]))


# The Arrow schema: exact round trip, documented columns, versions.


@given(measurements)
def test_a_table_and_a_line_of_a_log_are_read_as_their_row_is(measurement: Measurement) -> None:
    table = to_table([measurement, row()])
    assert table.schema.equals(schema(), check_metadata=True)
    assert from_table(table) == [measurement, row()]
    assert repr(through_json(measurement)) == repr([measurement])


def test_every_field_is_described_and_every_description_has_a_field() -> None:
    columns = {f.name for f in dataclasses.fields(Measurement)} - {"metrics"}
    columns |= {f.name for f in dataclasses.fields(Metrics)}
    assert set(schema().names) == columns == set(COLUMN_DOCS)
    for record in (Sample, Item, MeasureSettings):
        assert set(NESTED_DOCS[record.__name__]) == {f.name for f in dataclasses.fields(record)}
    for column in schema():
        assert column.metadata[b"description"], column.name


def test_text_that_is_not_unicode_is_escaped() -> None:
    broken = b"error \xff\xfe end".decode("utf-8", "surrogateescape")
    (back,) = from_table(to_table([row(failure_tail=broken)]))
    assert back.failure_tail == "error \\udcff\\udcfe end"


def test_an_older_table_is_filled_up() -> None:
    (back,) = from_table(to_table([row()]).drop_columns(["details", "recorded_at"]))
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


# ---------------------------------------------------------------- values


SOUND = to_table([row(1), row(2)])
#: Of each kind of number, flat and nested, a column or a field of it.
PLACES = [
    *(("batch_size",), ("cards",), ("niceness",), ("recorded_at",), ("load_s",), ("drift",)),
    *(("loss_first",), ("card_indices", "[]"), ("measure", "confidence"), ("items", "[]", "rank")),
    *(("samples", "[]", "wall_s"), ("samples", "[]", "step_s", "[]"), ("samples", "[]", "loss")),
]
RECORDS = {"samples": "Sample", "items": "Item", "measure": "MeasureSettings"}


def place_of(column: str, *path: str) -> tuple[pa.DataType, Any]:
    """The type and the range of a number."""
    kind, doc = schema().field(column).type, COLUMN_DOCS[column]
    for step in path:
        nested = kind.value_type if step == "[]" else kind.field(step).type
        if step != "[]":
            doc = RANK if step == "rank" else NESTED_DOCS[RECORDS[column]][step]
        kind = nested
    return kind, doc.allowed


def put(value: Any, path: tuple[str, ...], number: Any) -> Any:
    if not path:
        return number
    if path[0] == "[]":
        return [put(value[0] if value else None, path[1:], number)]
    return {**(value or {}), path[0]: put((value or {}).get(path[0]), path[1:], number)}


def table_with(name: str, path: tuple[str, ...], number: Any) -> pa.Table:
    field = SOUND.schema.field(name)
    column = SOUND[name]
    if pa.types.is_timestamp(field.type):
        column = column.cast(pa.int64())
        number = number if number is None else int(number) * 1_000_000
    first, second = column.to_pylist()
    values = pa.array([first, put(second, path, number)], field.type)
    return SOUND.set_column(SOUND.schema.get_field_index(name), field, values)


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_every_number_has_its_range(place: tuple[str, ...]) -> None:
    (name, *rest), (kind, allowed) = place, place_of(*place)
    path = tuple(rest)
    for number in (allowed.low, allowed.high):
        whole = not pa.types.is_floating(kind)
        assert fault(table_with(name, path, int(number) if whole else number)) == ""
    beyond: list[Any] = [
        allowed.low - 1 - abs(allowed.low) / 1000,
        allowed.high + 1 + allowed.high / 1000,
    ]
    if pa.types.is_floating(kind):
        odd = [float("nan"), float("inf"), float("-inf")]
        if allowed.finite:
            beyond += odd
        else:
            assert all(fault(table_with(name, path, each)) == "" for each in odd)
    else:
        beyond = [int(number) for number in beyond]
    for number in beyond:
        reason = fault(table_with(name, path, number))
        assert "not in its range" in reason and reason.startswith(name), (number, reason)


OTHERS = [pa.int32(), pa.float32(), pa.large_string(), pa.binary(), pa.list_(pa.int32())]
OTHERS += [pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.map_(pa.string(), pa.int64())]
OTHERS += [pa.dictionary(pa.int32(), pa.string()), pa.struct([("x", pa.int64())]), pa.null()]
OTHERS += [pa.list_(pa.struct([("rank", pa.int64())])), pa.list_(pa.list_(pa.string()))]


def test_a_column_of_any_other_type_is_refused() -> None:
    one_of_each = {field.type: field.name for field in schema()}
    for kind, name in one_of_each.items():
        for other in (each for each in OTHERS if each != kind):
            table = SOUND.select([name])
            table = table.set_column(0, name, pa.nulls(SOUND.num_rows, other))
            with pytest.raises(StoreError, match=name):
                current(table, "a file", [name])


SAMPLE = SOUND["samples"].to_pylist()[0][0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("job_id", None), ("state", "DREAMING"), ("accelerator", "TPU"), ("nodes", [None])),
        *(("parameters", [("a", text)]) for text in ("{", "[1]", None, '"\\ud800"')),
        *(("details", [("a", None)]), ("samples", [SAMPLE | {"wall_s": None}])),
        ("samples", [SAMPLE, None]),
    ],
    ids=str,
)
def test_values_that_are_none_of_their_column_are_named(name: str, value: Any) -> None:
    field = SOUND.schema.field(name)
    values = pa.array([SOUND[name].to_pylist()[0], value], field.type)
    assert fault(SOUND.select([name]).set_column(0, field, values))


def test_bad_files_among_sound_ones_are_named() -> None:
    tables = {str(n): to_table([row(n)]) for n in range(9)}
    assert faults(tables) == {}
    bad = table_with("batch_size", (), 0)
    assert faults({**tables, "bad": bad, "empty": SOUND.slice(0, 0)}) == {
        "bad": "batch_size is 0, not in its range: 1 to 2,147,483,648",
        "empty": "it holds no rows",
    }


ODD = st.sampled_from([float("nan"), float("inf"), -1.0, -(2.0**60), 1e300, 5.0])
WHOLE = st.sampled_from([-1, 2**53 + 1, 2**63, 2**70, 7])


@pytest.mark.slow
@given(one=measurements, throughput=ODD, weight=WHOLE, started=ODD, wall=ODD, step=ODD)
def test_what_was_measured_is_never_refused(one, throughput, weight, started, wall, step) -> None:
    """Whatever numbers a workload, a clock or a counter gave."""
    odd = Measurement(
        **{
            **{name: getattr(one, name) for name in Measurement.__slots__},
            "job_id": "0123456789abcdef",
            "metrics": Metrics(throughput=throughput),
            "weight_bytes": weight,
            "started_at": started,
            "details": {},
            "samples": ((0, sample(wall_s=wall, step_s=(0.1, step))), (0, sample())),
        }
    )
    table = table_of([row_in(line_of(row_of(odd)))])
    assert fault(table) == ""
    (back,) = from_table(table)
    told = back.details.get(OUT_OF_RANGE, "")
    for name, value, kept in (
        ("throughput", throughput, back.metrics.throughput),
        ("weight_bytes", weight, back.weight_bytes),
        ("started_at", started, back.started_at),
    ):
        assert (kept == value) != (f"{name}={value!r}" in told), (name, value, kept, told)
    assert (len(back.samples) == 1) == ("samples[0]" in told)
