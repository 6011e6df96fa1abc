"""Readers beside a writer, ours and others': a listing is of no one moment, a file may go
meanwhile."""

from __future__ import annotations

import errno
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from measurements import numbers, row

from orchestrator.report.export import records
from orchestrator.report.run_report import read_summary
from orchestrator.store import disk, reader
from orchestrator.store.reader import raw_batches, with_raw
from orchestrator.store.store import Store


def test_rows_of_a_log_are_read_as_those_of_files(tmp_path: Path) -> None:
    with Store(tmp_path, "night") as store:
        store.append(row(0), row(1))
        store.to_parquet()
        store.append(row(2, image=b"\0png\xff"))
        whole = [row(0), row(1), row(2, image=b"\0png\xff")]
        assert store.measurements() == whole
        lean = store.measurements(samples=False)
        assert [each.job_id for each in lean] == [row(n).job_id for n in range(3)]
        found = [
            each for rows, _ in raw_batches(store.tables_path, lean, "samples") for each in rows
        ]
        assert sorted(each.job_id for each in found) == sorted(each.job_id for each in lean)
        filled = with_raw(store.tables_path, lean, "samples", "items", "image")
        assert sorted(filled, key=lambda each: each.batch_size or 0) == whole
        assert len(store.history()) == 3


def test_a_log_of_a_development_version_is_named_and_stays(tmp_path: Path) -> None:
    with Store(tmp_path, "night") as store:
        store.append(row(0))
        log = store.tables_path / ".appended-0123456789abcdef-1.arrows"
        log.write_bytes(b"rows")
    with Store(tmp_path, "night") as again:
        assert again.measurements() == [row(0)] and log.exists()
        (damage,) = again.read().damaged
        assert damage.path == log and "commit 7f860c86" in damage.reason


def test_a_listing_that_misses_a_log_and_the_file_of_it_is_taken_again(tmp_path, monkeypatch):
    """A directory of many files is listed in pieces: the file had not come when its place was
    passed, and the log had gone when its own was."""
    with Store(tmp_path, "night") as store:
        store.append(row(0))
        store.to_parquet()
        stale = reader.row_files(store.tables_path)
        store.append(row(1))
        store.to_parquet()
        real, answers = reader.row_files, [stale]

        def listed(directory: Path) -> set[str]:
            return answers.pop() if answers else real(directory)

        monkeypatch.setattr(reader, "row_files", listed)
        assert numbers(Store(tmp_path, "night")) == [0, 1]
        assert not answers


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_file_that_went_while_it_was_read_is_looked_for_again(tmp_path, monkeypatch, kind):
    """On a network file system that is no missing file, but a stale handle."""
    with Store(tmp_path, "night") as store:
        for number in range(3):
            store.append(row(number))
            if number < 2:
                store.to_parquet()
        read = disk.read

        def stale(path: Path, *arguments: Any, **options: Any) -> bytes:
            if path.suffix == kind:
                monkeypatch.undo()
                store.compact()
                assert not path.exists()
                raise OSError(errno.ESTALE, "Stale file handle")
            return read(path, *arguments, **options)

        monkeypatch.setattr(disk, "read", stale)
        assert numbers(Store(tmp_path, "night")) == [0, 1, 2]
        assert disk.read is read


def test_a_reader_of_many_files_need_not_be_faster_than_the_writer(tmp_path, monkeypatch) -> None:
    """Whenever it has read two files more, the log has become one and another is begun."""
    with Store(tmp_path, "night") as store:
        for number in range(3):
            store.append(row(number))
            store.to_parquet()
        store.append(row(3))
        read, coming, reads = disk.read, itertools.count(4), itertools.count(1)

        def meanwhile(path: Path, *arguments: Any) -> bytes:
            data = read(path, *arguments)
            count = next(reads)
            assert count < 30, "it reads again what it has read"
            if path.suffix == ".parquet" and count < 20 and count % 2 == 0:
                with monkeypatch.context() as writing:
                    writing.setattr(disk, "read", read)
                    store.to_parquet()
                    store.append(row(next(coming)))
            return data

        monkeypatch.setattr(disk, "read", meanwhile)
        found = numbers(Store(tmp_path, "night"))
        monkeypatch.undo()
        assert found == list(range(next(coming)))


COUNT = 9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A run that is being written: a compacted file, others, and one that a crash left half
    written."""
    with Store(tmp_path / "results", "smoke") as store:
        for number in range(COUNT):
            if number == 5:
                store.compact()
            store.append(row(number))
            if number % 4 == 3:
                store.to_parquet()
        store.to_parquet()
        (store.tables_path / ".x-1-0000000000000000.parquet.partial").write_bytes(b"PAR1 torn")
        yield store


def by_pyarrow(rows: Path) -> list[dict]:
    import pyarrow.dataset

    return pyarrow.dataset.dataset(rows).to_table().to_pylist()


def by_pandas(rows: Path) -> list[dict]:
    import pandas

    return pandas.read_parquet(rows).to_dict("records")


def by_polars(rows: Path) -> list[dict]:
    import polars

    return polars.read_parquet(f"{rows}/*.parquet").to_dicts()


@pytest.mark.slow
@pytest.mark.parametrize("read", [by_pyarrow, by_pandas, by_polars])
def test_a_plain_reader_sees_every_row(store: Store, read: Callable[[Path], list[dict]]) -> None:
    pytest.importorskip(read.__name__.removeprefix("by_"))
    found = {int(r["batch_size"]): r for r in read(store.tables_path)}
    assert sorted(found) == list(range(1, COUNT + 1))
    one = found[3]
    assert (one["state"], one["accelerator"], one["emulated"]) == ("SUCCEEDED", "HPU", True)
    assert one["throughput"] == 102.0
    assert one["recorded_at"].timestamp() == 1002.0
    assert one["recorded_at"].utcoffset().total_seconds() == 0
    assert one["measure"]["confidence"] == 0.95
    (sample,) = one["samples"]
    assert (sample["rank"], list(sample["step_s"])) == (0, [0.01, 0.02])
    assert sample["wall_s"] == pytest.approx(100 / 102)  # as the throughput has it
    assert "裤 ✓" in str(one["details"])
    assert "ignore_eos" in str(one["parameters"])


def test_the_documented_queries_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    duckdb = pytest.importorskip("duckdb")
    text = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
    queries = [q for block in re.findall(r"```sql\n(.*?)```", text, re.S) for q in block.split(";")]
    queries = [query for query in queries if query.strip()]
    assert len(queries) == 2
    monkeypatch.chdir(store.path.parent.parent)
    best, samples = (duckdb.sql(query).fetchall() for query in queries)
    assert best == [("bf16", COUNT, 100.0 + COUNT - 1)]
    assert len(samples) == COUNT


# A results directory that version 0.1.0 wrote is read with the figures that it reported.

#: Rows of the states in which a job ends, three with raw samples. ``rows.jsonl`` is what that
#: version's ``report --format json`` said of them.
WRITTEN = Path(__file__).with_name("version_0_1_0")


def test_its_rows_have_the_figures_that_it_reported(tmp_path: Path) -> None:
    rows = tmp_path / "night" / "rows"
    shutil.copytree(WRITTEN, rows, ignore=shutil.ignore_patterns("*.jsonl"))
    summary, _ = read_summary(Store.existing(tmp_path, "night"))
    now = {record["job_id"]: record for record in records(summary.rows)}
    then = [json.loads(line) for line in (WRITTEN / "rows.jsonl").read_text().splitlines()]
    assert len(now) == len(then) == 9
    for old in then:
        assert {name: now[old["job_id"]][name] for name in old} == old
