"""Columns of many rows at once: as if each row were looked at alone, and the same bytes again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from measurements import row, sample

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.results.columns import Odd, columns_of
from orchestrator.results.record import record_of
from orchestrator.results.schema import undocumented_schema
from orchestrator.results.tables import from_table, to_batch, to_table
from workloads.base import MeasureSettings

#: A row that is looked at alone, and with it all of its record.
ODD = replace(row(99), load_s=-1.0)
ROWS = [
    row(1),
    row(2, image=b"png", parameters={"a": 1, "b": True, "c": 1.0, "d": None, "e": "\udcff"}),
    row(3, samples=(), items=(), details={}, versions={}, nodes=(), card_indices=()),
    row(4, samples=((0, sample()), (1, sample(step_s=(0.5, 0.25), loss=math.nan)))),
    row(5, state=State.FAILED, failure_tail="\udc80 裤", final=False, batch_size=None),
    row(6, workload_metrics={"figure": 2.5}, measure=MeasureSettings(time_limit_s=7)),
    row(7, recorded_at=None, started_at=1.0000005, ended_at=None),
]


def batch_of(*rows: Measurement) -> pa.RecordBatch:
    """The columns of rows as one batch."""
    columns = undocumented_schema().remove_metadata()
    return pa.RecordBatch.from_arrays(columns_of(rows), schema=columns)


@pytest.mark.parametrize("count", [1, 2, len(ROWS)])
def test_columns_are_those_of_rows_that_are_looked_at_one_by_one(count: int) -> None:
    """Whatever is in them: gangs, no samples, texts that are no Unicode, several types."""
    for begin in range(len(ROWS) - count + 1):
        rows = ROWS[begin : begin + count]
        alone = to_batch([*rows, ODD], documented=False).slice(0, count)
        together = batch_of(*rows)
        together.validate(full=True)
        assert repr(together.to_pylist()) == repr(alone.to_pylist())  # a NaN is like itself in it
        assert together.schema.equals(alone.schema, check_metadata=True)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
def test_the_same_rows_have_the_same_bytes_after_others(count: int) -> None:
    """A record that is written again after a failure must not be a second one."""
    rows = [row(number) for number in range(count)]
    name, data = record_of(rows)
    record_of(ROWS)
    record_of([row(5)] * 200)
    again = [row(number) for number in range(count)]
    assert record_of(again) == (name, data)


@pytest.mark.parametrize(
    "changes",
    [
        {"load_s": -1.0},
        {"load_s": math.nan},
        {"cards": 0},
        {"recorded_at": 1e12},
        {"samples": ((0, sample(wall_s=math.inf)),)},
        {"samples": ((0, sample(step_s=(0.1, -0.1))),)},
        {"measure": MeasureSettings(confidence=2.0)},
    ],
    ids=str,
)
def test_a_number_out_of_range_is_odd(changes: dict[str, Any]) -> None:
    """Beside a row that is not."""
    with pytest.raises(Odd):
        columns_of([row(1), row(2, **changes)])


def test_what_was_written_together_is_read_as_it_was() -> None:
    """Each value, of its own type."""
    rows = [ROWS[0], ROWS[2], ROWS[5], replace(ROWS[1], parameters={"a": 1, "b": True, "c": 1.0})]
    found = from_table(to_table(rows))
    assert found == rows
    assert [type(value) for value in found[3].parameters.values()] == [int, bool, float]
