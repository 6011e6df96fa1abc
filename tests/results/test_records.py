"""Records that are JSON: read as Arrow's would be, and no worse when somebody else made them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measurements import row, sample

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.results import bulk, fragments, record
from orchestrator.results.append_log import AppendLog
from orchestrator.results.bulk import read_lean, with_raw
from orchestrator.results.record import record_of, record_table
from orchestrator.results.schema import OUT_OF_RANGE, column_names
from orchestrator.results.store import Store
from orchestrator.results.tables import from_table, to_table
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


def told(*rows: Measurement) -> dict[str, Any]:
    """The content of a record."""
    name, data = record_of(rows)
    assert not fragments.is_arrow_record(name)
    content: dict[str, Any] = json.loads(data)
    return content


def planted(directory: Path, content: object) -> Store:
    """A run with two sound rows and, between them, a record that its checksum fits."""
    store = Store.open(directory, "night")
    store.tables_path.mkdir(parents=True)
    log = AppendLog(store.tables_path)
    data = json.dumps(content).encode()
    for name, each in (record_of([row(0)]), (fragments.record_name("x", 1, data), data)):
        log.append(name, each)
    log.append(*record_of([row(9)]))
    log.close()
    return store


@pytest.mark.parametrize("count", [1, 2, len(ROWS)])
def test_a_record_is_read_as_its_rows_are(count: int) -> None:
    """Whatever is in them: gangs, no samples, texts that are no Unicode, several types."""
    for begin in range(len(ROWS) - count + 1):
        rows = ROWS[begin : begin + count]
        name, data = record_of(rows)
        assert name.endswith(".json")
        assert repr(from_table(record_table(name, data))) == repr(from_table(to_table(rows)))
        some = record_table(name, data, ["samples", "job_id"])
        assert some.column_names == ["samples", "job_id"]
        assert some["job_id"].to_pylist() == [each.job_id for each in rows]


@pytest.mark.parametrize(
    "changes",
    [
        {"load_s": np.float32(1.5)},
        {"load_s": np.float64(1.5)},
        {"worker_pid": np.int64(7)},
        {"load_s": -1.0},
        {"load_s": math.nan},
        {"samples": ((0, sample(wall_s=math.inf)),)},
        {"samples": ((0, sample(step_s=(0.1, np.float32(0.5)))),)},
        {"load_s": True},
        {"emulated": 1},
        {"worker_pid": 1.5},
        {"reason": 5},
        {"card_indices": ("a",)},
        {"card_indices": (True,)},
        {"nodes": (1,)},
        {"image": "text"},
        {"samples": ((True, sample()),)},
        {"samples": ((0, sample(step_s=(True,))),)},
        {"samples": ((0, sample(warmup=1)),)},
        {"measure": MeasureSettings(min_repeats="x")},  # type: ignore[arg-type]
        {"details": {"a": 1}},
        {"versions": {"a": None}},
    ],
    ids=str,
)
def test_a_value_of_another_kind_goes_the_old_way(changes: dict[str, Any]) -> None:
    """Into an Arrow record as it always did, or it is refused: never into JSON that no reader
    takes."""
    try:
        expected = to_table([row(1, **changes)])
    except Exception as error:
        with pytest.raises(type(error)):
            record_of([row(1, **changes)])
        return
    name, data = record_of([row(1, **changes)])
    assert fragments.is_arrow_record(name)
    assert repr(from_table(record_table(name, data))) == repr(from_table(expected))


def test_many_rows_are_an_arrow_stream_and_lie_beside_few(tmp_path: Path) -> None:
    """In one log; each row is read once, and is in the file that is made of it."""
    with Store.open(tmp_path, "night") as store:
        store.append(*(row(number) for number in range(20)))
        store.append(row(20))
        store.append(row(21), row(22))
        assert store.measurements() == [row(number) for number in range(23)]
        found = sorted(
            each.batch_size or 0
            for each in with_raw(store, read_lean(store).measurements, "samples", "image")
        )
        assert found == list(range(1, 24))
        store.to_parquet()
    assert store.measurements() == [row(number) for number in range(23)]


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    *above, last = path.split("/")

    def made(content: dict[str, Any]) -> None:
        for each in above:
            content = content[each]
        if value is ...:
            del content[last]
        else:
            content[last] = value

    return made


@pytest.mark.parametrize(
    "spoil",
    [
        change("rows", 10**9),
        change("rows", -1),
        change("rows", True),
        change("columns", []),
        change("columns", {}),
        change("columns/job_id", ...),
        change("columns/job_id", ["a", "b"]),
        change("columns/cards", [10**30]),
        change("columns/cards", ["a"]),
        change("columns/cards", [0]),
        change("columns/state", ["DONE"]),
        change("columns/parameters", [5]),
        change("columns/parameters", [[["a"]]]),
        change("columns/parameters", [[["a", "{"]]]),
        change("columns/measure", [5]),
        change("columns/image", ["not base64"]),
        change("columns/image", [5]),
        change("columns/samples", []),
        change("columns/samples/counts", [-1]),
        change("columns/samples/counts", ["a"]),
        change("columns/samples/values/rank", ...),
        change("columns/samples/values/step_s", [[0.5]]),
        change("columns/samples/values/step_s/doubles", "AAAA"),
        change("columns/samples/values/step_s/doubles", "é"),
        change("columns/samples/values/step_s/counts", [-1]),
        change("schema_version", None),
    ],
    ids=[str(number) for number in range(26)],
)
def test_a_planted_record_costs_no_other(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    """It is named as damaged, for good, and set aside by the next writer; those beside it are
    read, with their own values."""
    content = told(row(1))
    spoil(content)
    store = planted(tmp_path, content)
    contents = store.read()
    assert list(contents.measurements) == [row(0), row(9)]
    (damage,) = contents.damaged
    assert not damage.passing
    with store:
        assert list(store.measurements()) == [row(0), row(9)]
    assert len(list(store.quarantine_path.iterdir())) == 1


@pytest.mark.parametrize("content", [5, [], {}, None, "text"], ids=repr)
def test_json_that_is_no_record_is_damage(tmp_path: Path, content: object) -> None:
    """As anything else is that holds no rows."""
    store = planted(tmp_path, content)
    assert len(store.measurements()) == 2 and len(store.read().damaged) == 1


def test_a_record_of_an_older_program_has_defaults(tmp_path: Path) -> None:
    """For columns and nested fields that came later."""
    content = told(row(1))
    for name in ("replicate", "details", "items", "load_s"):
        content["columns"].pop(name, None)
    del content["columns"]["samples"]["values"]["step_s"]
    content["columns"] |= {
        "later": ["what nobody here knows"],
        "raw": {"counts": [0], "values": {}},
    }
    content["columns"]["samples"]["values"]["later"] = {"counts": [1], "doubles": ""}
    (_, found, _) = sorted(planted(tmp_path, content).measurements(), key=lambda each: each.job_id)
    first = row(1)
    bare = tuple((rank, replace(each, step_s=())) for rank, each in first.samples)
    expected = replace(
        first, replicate=1, details={}, items=(), load_s=None, samples=bare, job_id=found.job_id
    )
    by_size = {each.batch_size: each for each in Store.open(tmp_path, "night").measurements()}
    assert by_size[2] == replace(expected, job_id=first.job_id)


def test_a_record_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    """It is no damage."""
    with pytest.raises(SchemaMismatch, match="schema version 99"):
        planted(tmp_path, told(row(1)) | {"schema_version": 99}).measurements()


def test_a_value_that_fits_nowhere_is_named() -> None:
    """With its column."""
    with pytest.raises(StoreError, match="reason"):
        record_of([row(1, reason=5)])
    with pytest.raises(StoreError, match="worker_pid is 'x'"):
        record_of([row(1, worker_pid="x")])
    with pytest.raises(StoreError, match="fit"):
        record_of([row(1, details={"a": 1})])


def test_columns_that_are_not_wanted_are_not_made() -> None:
    """A reader that follows a run asks for a few."""
    name, data = record_of(ROWS)
    lean = record_table(name, data, column_names(raw=False))
    assert "samples" not in lean.column_names and lean.num_rows == len(ROWS)


def test_a_record_is_the_same_whatever_was_written_before() -> None:
    """Settings that are equal may be written otherwise: 7 s, and 7.0."""
    exact = row(1, measure=MeasureSettings(time_limit_s=7.125, least_s=3.0))
    first = record_of([exact])
    other = replace(exact, measure=MeasureSettings(time_limit_s=7.125, least_s=3))
    assert exact == other and record_of([other])[0] != first[0]
    for number in range(300):  # more than are remembered
        record_of([row(2, measure=MeasureSettings(time_limit_s=100 + number))])
    record_of([other])
    assert record_of([exact]) == first


def test_want_of_memory_makes_no_other_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is appended again after it would be two."""

    def fail(rows: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(record, "values_of", fail)
        with pytest.raises(MemoryError):
            record_of([row(1)])
    assert not fragments.is_arrow_record(record_of([row(1)])[0])


def test_records_of_a_log_are_converted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, a night whose Parquet files fail would take minutes to read."""
    converted: list[int] = []
    real = bulk.measurements_of

    def counted(table: Any, **more: Any) -> Any:
        converted.append(table.num_rows)
        return real(table, **more)

    monkeypatch.setattr(bulk, "measurements_of", counted)
    with Store.open(tmp_path, "night") as store:
        for number in range(5):
            store.append(row(number))
        store.append(*(row(number) for number in range(5, 25)))
        found = read_lean(store).measurements
        assert sorted(each.batch_size or 0 for each in found) == list(range(1, 26))
    assert converted == [25]


TOKEN = Item(index=0, input_tokens=1, output_tokens=1, latency_s=1.0, output_ids=(-1,))


@pytest.mark.parametrize(
    "told",
    [
        {"card_indices": (1_000_001,)},
        {"items": ((0, TOKEN),)},
    ],
    ids=["card", "token"],
)
@pytest.mark.parametrize("count", [1, 20])
def test_a_list_with_a_number_out_of_range_costs_no_row(
    tmp_path: Path, told: dict[str, Any], count: int
) -> None:
    """The list is empty, and the row says what stood there."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0, **told), *(row(number) for number in range(1, count)))
        found, *others = sorted(store.measurements(), key=lambda each: each.batch_size or 0)
    assert len(others) == count - 1
    assert "1000001" in found.details[OUT_OF_RANGE] or "-1" in found.details[OUT_OF_RANGE]


@pytest.mark.parametrize("odd", ["", "parsed", "joined"])
def test_one_odd_record_leaves_the_others_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    """Fifty sound records and one that is none, or of which a value is none: the sound ones are
    read by a dozen conversions at most."""
    converted = 0
    real = record.joined

    def counted(records: Any, columns: Any) -> Any:
        nonlocal converted
        converted += 1
        return real(records, columns)

    monkeypatch.setattr(record, "joined", counted)
    with Store.open(tmp_path, "night") as store:
        for number in range(25):
            store.append(row(number))
        if odd:
            content = told(row(99))
            change(*{"parsed": ("rows", -1), "joined": ("columns/cards", ["a"])}[odd])(content)
            data = json.dumps(content).encode()
            log = AppendLog(store.tables_path)
            log.append(fragments.record_name("x", 1, data), data)
            log.close()
        for number in range(25, 50):
            store.append(row(number))
        contents = store.read(samples=False)
    assert sorted(each.batch_size or 0 for each in contents.measurements) == list(range(1, 51))
    assert len(contents.damaged) == bool(odd)
    assert 1 <= converted <= {"": 2, "parsed": 3, "joined": 16}[odd]
