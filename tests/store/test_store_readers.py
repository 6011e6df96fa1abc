"""Plain readers open the rows as they are: pyarrow, pandas, DuckDB and Polars."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from measurements import row

from orchestrator.report.export import records
from orchestrator.report.run_report import read_summary
from orchestrator.store.store import Store

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


def by_duckdb(rows: Path) -> list[dict]:
    import duckdb

    with duckdb.connect() as connection:
        found = connection.sql(f"SELECT * FROM read_parquet('{rows}/*.parquet')")
        return found.to_arrow_table().to_pylist()


def by_polars(rows: Path) -> list[dict]:
    import polars

    return polars.read_parquet(f"{rows}/*.parquet").to_dicts()


@pytest.mark.slow
@pytest.mark.parametrize("read", [by_pyarrow, by_pandas, by_duckdb, by_polars])
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


def test_parameters_can_be_queried(store: Store) -> None:
    duckdb = pytest.importorskip("duckdb")
    found = duckdb.sql(
        "SELECT DISTINCT parameters['output_tokens']::INTEGER, parameters['ignore_eos']::BOOLEAN "
        f"FROM read_parquet('{store.tables_path}/*.parquet')"
    ).fetchall()
    assert found == [(25, True)]


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
