"""The allowed content of a row file, column by column, by a walk over the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from measurement_strategies import measurements
from measurements import row

from orchestrator.core.errors import StoreError
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store.codec import from_table, line_of, row_in, row_of, table_of, to_table
from orchestrator.store.column_docs import COLUMN_DOCS, NESTED_DOCS, RANK
from orchestrator.store.schema import OUT_OF_RANGE, current, fault, faults, schema

SOUND = to_table([row(1), row(2)])
RECORDS = {"samples": "Sample", "items": "Item", "measure": "MeasureSettings"}
NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_timestamp)


def leaves(kind: pa.DataType, docs: Any) -> Iterator[tuple[tuple[str, ...], pa.DataType, Any]]:
    if pa.types.is_list(kind) and not pa.types.is_map(kind):
        for path, inner, doc in leaves(kind.value_type, docs):
            yield ("[]", *path), inner, doc
    elif pa.types.is_struct(kind):
        for field in kind:
            for path, inner, doc in leaves(field.type, docs[field.name]):
                yield (field.name, *path), inner, doc
    elif any(is_kind(kind) for is_kind in NUMBERS):
        yield (), kind, docs


PLACES = [
    (field.name, path, kind, doc.allowed)
    for field in schema()
    for path, kind, doc in leaves(
        field.type,
        {"rank": RANK, **NESTED_DOCS[RECORDS[field.name]]}
        if field.name in RECORDS
        else COLUMN_DOCS[field.name],
    )
]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path", "kind", "allowed"), PLACES, ids=[".".join([p[0], *p[1]]) for p in PLACES]
)
def test_every_number_has_its_range(name: str, path: Any, kind: Any, allowed: Any) -> None:
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
