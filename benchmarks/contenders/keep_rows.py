"""Rows kept in one of three ways: keep_rows.py nightgrid|json|sqlite DIRECTORY APPENDED STORED.

The rows that are read are written once, before the first turn, as fast as each way allows: for
Nightgrid as a compacted file, which is what a big run leaves. They are ``KINDS`` rows over and over
under names of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.contender import serve
from benchmarks.contenders.row import row
from orchestrator.results import fragments
from orchestrator.results.row_file import parquet
from orchestrator.results.scan import scan_rows
from orchestrator.results.store import Store
from orchestrator.results.tables import to_table

#: Columns that a question about a run asks for.
COLUMNS = ("job_id", "state", "precision", "batch_size", "started_at", "ended_at")
KINDS = 5000  # more than a compressor remembers


class Nightgrid:
    """Our store: a durable record a row in a log, Parquet of a hundred rows, compacted files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._store = Store.open(directory, "appended").__enter__()

    def append(self, measurement: Any) -> None:
        self._store.append(measurement)

    def settle(self) -> None:
        """Make Parquet of what was appended, as a run does every few seconds."""
        self._store.to_parquet()

    def fill(self, name: str, count: int) -> None:
        import pyarrow as pa

        store = Store.open(self._directory, name)
        store.tables_path.mkdir(parents=True, exist_ok=True)
        kinds = to_table([row(number) for number in range(min(KINDS, count))])
        place = kinds.column_names.index("attempt_id")
        parts = []
        for first in range(0, count, KINDS):
            names = [f"row-{number}" for number in range(first, min(first + KINDS, count))]
            field = kinds.schema.field(place)
            parts.append(kinds.slice(0, len(names)).set_column(place, field, pa.array(names)))
        table = pa.concat_tables(parts)
        data = parquet(table, use_dictionary=True)
        (store.tables_path / fragments.compacted_name(table.num_rows, data)).write_bytes(data)

    def read(self, name: str) -> int:
        return int(
            scan_rows(Store.open(self._directory, name).tables_path, COLUMNS).joined().num_rows
        )


class JsonFiles:
    """One file a row."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def append(self, measurement: Any) -> None:
        directory = self._directory / "appended"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{measurement.attempt_id}.json"
        with path.open("w") as file:
            file.write(_as_json(measurement))
            file.flush()
            os.fsync(file.fileno())
        handle = os.open(directory, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    def fill(self, name: str, count: int) -> None:
        directory = self._directory / name
        directory.mkdir(parents=True)
        for number, text in enumerate(_texts(count)):
            (directory / f"{number}.json").write_text(text)

    def read(self, name: str) -> int:
        found = []
        for path in (self._directory / name).iterdir():
            told = json.loads(path.read_text())
            found.append(tuple(told[column] for column in COLUMNS))
        return len(found)

    def settle(self) -> None:
        """Rows are where they stay."""


class Sqlite:
    """One table, a commit a row."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def _open(self, name: str) -> sqlite3.Connection:
        opened = sqlite3.connect(self._directory / f"{name}.sqlite")
        opened.execute("PRAGMA journal_mode=WAL")
        opened.execute("PRAGMA synchronous=FULL")
        opened.execute(f"CREATE TABLE IF NOT EXISTS rows ({', '.join(COLUMNS)}, whole)")
        return opened

    def _insert(self, opened: sqlite3.Connection, whole: str) -> None:
        told = json.loads(whole)
        marks = ", ".join("?" * (len(COLUMNS) + 1))
        opened.execute(
            f"INSERT INTO rows VALUES ({marks})", [*(told[name] for name in COLUMNS), whole]
        )

    def append(self, measurement: Any) -> None:
        opened = self.__dict__.setdefault("_appended", self._open("appended"))
        self._insert(opened, _as_json(measurement))
        opened.commit()

    def settle(self) -> None:
        """Rows are where they stay."""

    def fill(self, name: str, count: int) -> None:
        opened = self._open(name)
        for text in _texts(count):
            self._insert(opened, text)
        opened.commit()
        opened.close()

    def read(self, name: str) -> int:
        opened = self._open(name)
        found = opened.execute(f"SELECT {', '.join(COLUMNS)} FROM rows").fetchall()
        opened.close()
        return len(found)


WAYS: dict[str, Callable[[Path], Any]] = {
    "nightgrid": Nightgrid,
    "json": JsonFiles,
    "sqlite": Sqlite,
}


def _as_json(measurement: Any) -> str:
    told = {name: getattr(measurement, name) for name in measurement.__slots__}
    return json.dumps(told, default=str)


def _texts(count: int) -> Iterable[str]:
    """So many rows as JSON."""
    kinds = [_as_json(replace(row(each), attempt_id="row-n")) for each in range(min(KINDS, count))]
    return (kinds[n % KINDS].replace('"row-n"', f'"row-{n}"') for n in range(count))


def main() -> None:
    kind, directory = sys.argv[1], Path(sys.argv[2])
    appended, stored = int(sys.argv[3]), int(sys.argv[4])
    way = WAYS[kind](directory)
    way.fill("whole", stored)
    way.fill("tenth", stored // 10)
    numbers = iter(range(10**9))

    def turn() -> dict[str, Any]:
        waited, used = [], []
        for measurement in [
            replace(row(number), attempt_id=f"new-{number}") for number in islice(numbers, appended)
        ]:
            wall, cpu = time.perf_counter(), time.process_time()
            way.append(measurement)
            waited.append(time.perf_counter() - wall)
            used.append(time.process_time() - cpu)
        told: dict[str, Any] = {
            "work": appended,
            "append_ms": sorted(waited)[len(waited) // 2] * 1e3,
            "append_cpu_ms": sorted(used)[len(used) // 2] * 1e3,
        }
        cpu = time.process_time()
        way.settle()
        told["settle_cpu_ms"] = (time.process_time() - cpu) / appended * 1e3
        for name, prefix, count in (
            ("tenth", "read_tenth", stored // 10),
            ("whole", "read", stored),
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            if way.read(name) != count:
                raise RuntimeError(f"{kind} read another number of rows than {count}")
            told[f"{prefix}_s"] = time.perf_counter() - wall
            told[f"{prefix}_cpu_us_per_row"] = (time.process_time() - cpu) / count * 1e6
        told["bytes"] = sum(
            path.stat().st_size for path in directory.rglob("*whole*") if path.is_file()
        ) + sum(p.stat().st_size for p in (directory / "whole").rglob("*") if p.is_file())
        return told

    try:
        serve(turn)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
