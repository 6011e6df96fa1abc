"""Earlier rows as planning needs them, and the small tables beside the rows of a run.

Each run's driver writes a table of its card checks (``CARD_CHECKS``), with the fields of
``CardCheck`` as columns; a card's history spans a results directory. A run that left cells
unmeasured has a table of their predicted figures (``PREDICTIONS``), in the same way.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.core.card_check import (
    CardCheck,
    SlowCard,
    slow_cards,
    slow_checks,
    spread_of_runs,
)
from orchestrator.core.errors import StoreError
from orchestrator.core.job import Accelerator, Scalar, State
from orchestrator.core.measurement import Prediction
from orchestrator.core.plan import TOOK, PastRow
from orchestrator.core.settings import as_declared
from orchestrator.store import disk
from orchestrator.store.codec import values_of
from orchestrator.store.files import CARD_CHECKS, PREDICTIONS
from orchestrator.store.reader import parquet_file, read_rows, runs
from orchestrator.store.schema import arrow_type, rules_of
from workloads import registry
from workloads.base import MeasureSettings
from workloads.util.files import SMALL_BYTES
from workloads.util.statistics import Spread

if TYPE_CHECKING:
    import pyarrow as pa

R = TypeVar("R")

_AS_THEY_ARE = (
    *("job_id", "attempt_number", "final", "emulated", "workload", "model", "dataset"),
    *("precision", "batch_size", "cards", "load_s", "queued_s"),
)
_COLUMNS = (
    *_AS_THEY_ARE,
    *("state", "engine", "accelerator", "parameters", "measure", "reason", "details"),
    *("started_at", "ended_at", "recorded_at", "work_version"),
)


def past_rows(directory: Path, *, whole: bool = False) -> list[PastRow]:
    """Rows in a directory, oldest first; with ``whole``, StoreError if a file is unreadable now."""
    import pyarrow.compute as pc

    look = read_rows(directory, _COLUMNS)
    if whole:
        look.refuse_unread("what was measured")
    table = look.table()
    took = pc.map_lookup(table["details"], TOOK, "first")
    measures = values_of("measure", table["measure"])
    rows = table.drop_columns(["details", "measure"]).append_column(TOOK, took).to_pylist()
    return [_past_row(row, measure) for row, measure in zip(rows, measures, strict=True)]


def cards_of_succeeded(directory: Path) -> Iterator[tuple[str, str, int]]:
    """Job id, node and card index of succeeded single-node rows."""
    columns = ("job_id", "state", "final", "nodes", "card_indices")
    for row in read_rows(directory, columns).table().to_pylist():
        if row["final"] and row["state"] == State.SUCCEEDED and len(row["nodes"] or ()) == 1:
            for index in row["card_indices"] or ():
                yield row["job_id"], row["nodes"][0], index


@lru_cache(maxsize=4096)
def _settings(
    workload: str, engine: str, pairs: tuple[tuple[str, str], ...], version: int
) -> tuple[tuple[tuple[str, Scalar], ...], str]:
    """A job's parameters as this version declares them, and why its work is outdated ("": it is
    not); most rows share them."""
    given = {name: json.loads(text) for name, text in pairs}
    parameters = tuple(sorted(as_declared(workload, engine, given).items()))
    return parameters, registry.outdated(workload, engine, given, version)


def _past_row(row: dict[str, Any], measure: MeasureSettings) -> PastRow:
    started, ended = row["started_at"], row["ended_at"]
    pairs, version = tuple(row["parameters"] or ()), row["work_version"] or 1
    parameters, outdated = _settings(row["workload"], row["engine"], pairs, version)
    return PastRow(
        **{name: row[name] for name in _AS_THEY_ARE},
        state=State(row["state"]),
        accelerator=Accelerator(row["accelerator"]),
        parameters=parameters,
        outdated=outdated,
        measure=measure,
        busy_s=(ended - started).total_seconds() if started and ended else None,
        reason=row["reason"] or "",
        took=row["took"] or "",
        recorded_at=row["recorded_at"].timestamp() if row["recorded_at"] is not None else 0.0,
    )


#: Newest runs that make up the history.
_MOST_RUNS = 50


def read_card_checks(run: Path) -> tuple[CardCheck, ...]:
    """The card checks of a run; none if the file cannot be read, since no figure needs them."""
    return _read_table(CardCheck, run / CARD_CHECKS)


def read_predictions(run: Path) -> tuple[Prediction, ...]:
    """The predicted figures of a run; none if the file cannot be read: it can be made again."""
    return _read_table(Prediction, run / PREDICTIONS)


def table_of(record: type[R], records: Iterable[R]) -> bytes:
    """The content of the file of such records."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = _schema(record)
    rows = [{name: getattr(one, name) for name in columns.names} for one in records]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=columns), buffer)
    return buffer.getvalue()


def _read_table(record: type[R], path: Path) -> tuple[R, ...]:
    import pyarrow as pa

    unreadable = (OSError, ValueError, TypeError, LookupError, StoreError, pa.ArrowException)
    with contextlib.suppress(*unreadable):
        data = disk.read(path, SMALL_BYTES, follow=False)
        table = parquet_file(data, path.name).read()
        columns = _schema(record)
        table = table.select([name for name in columns.names if name in table.column_names])
        known = pa.schema([columns.field(name) for name in table.column_names])
        records = tuple(record(**row) for row in table.cast(known).to_pylist())
        if all(_is_sound(record, one) for one in records):
            return records
    return ()


def _is_sound(record: type, one: object) -> bool:
    """Return whether a record from a file has every required value, and finite numbers."""
    return all(
        rule.optional if value is None else not isinstance(value, float) or isfinite(value)
        for name, rule in rules_of(record).items()
        for value in [getattr(one, name)]
    )


def earlier_card_checks(run: Path) -> tuple[CardCheck, ...]:
    """The card checks of the other runs beside this one, of the newest."""
    with contextlib.suppress(StoreError):
        others = [name for name in runs(run.parent) if name != run.name][:_MOST_RUNS]
        return tuple(check for name in others for check in read_card_checks(run.parent / name))
    return ()


def slow_cards_of(run: Path) -> tuple[SlowCard, ...]:
    """The slow cards of a run, compared with their neighbours and with earlier runs."""
    now = read_card_checks(run)
    return slow_cards(now, earlier_card_checks(run)) if now else ()


def slow_checks_of(run: Path) -> tuple[SlowCard, ...]:
    """The same of all of the run's checks, those that are not the newest of a card included."""
    now = read_card_checks(run)
    return slow_checks(now, earlier_card_checks(run)) if now else ()


def spread_between_runs(run: Path) -> Spread:
    """Spread of this run's cards' speed over the runs of its results directory; may be empty."""
    now = read_card_checks(run)
    cards = {check.card for check in now}
    earlier = (check for check in earlier_card_checks(run) if check.card in cards)
    return spread_of_runs([*now, *earlier]) if now else Spread()


def _schema(record: type) -> pa.Schema:
    import pyarrow as pa

    columns = []
    for name, rule in rules_of(record).items():
        words = {"description": rule.doc.meaning} if rule.doc.meaning else None
        columns.append(pa.field(name, arrow_type(rule.kind), metadata=words))
    return pa.schema(columns)
