"""The codec of rows: a measurement, a line of JSON and a table say the same."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from measurement_strategies import measurements
from measurements import row, sample

from orchestrator.core.errors import StoreError
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.store import codec
from orchestrator.store.codec import from_table, line_of, row_in, row_of, table_of, to_table
from orchestrator.store.schema import OUT_OF_RANGE
from orchestrator.store.validation import fault
from workloads.base import Item, MeasureSettings

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


@settings(max_examples=40, deadline=None)
@given(measurements)
def test_a_line_is_read_as_its_row_is(measurement: Measurement) -> None:
    assert repr(through_json(measurement)) == repr(from_table(to_table([measurement])))


@pytest.mark.parametrize(
    "changes",
    [
        *({"load_s": np.float32(1.5)}, {"load_s": np.float64(1.5)}, {"worker_pid": np.int64(7)}),
        *({"load_s": -1.0}, {"load_s": math.nan}, {"load_s": True}),
        *({"samples": ((0, sample(wall_s=math.inf)),)}, {"load_s": math.inf}),
        {"samples": ((0, sample(step_s=(0.1, np.float32(0.5)))),)},
        {"samples": ((0, sample(step_s=(-0.1,))),)},
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
    assert found.job_id == row(1).job_id
    plain = OUT_OF_RANGE not in found.details
    assert plain == any(isinstance(each, np.generic | bool) for each in changes.values()) or plain


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
