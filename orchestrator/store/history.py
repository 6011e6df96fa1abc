"""The columns of each row that planning and estimating need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.core.job import Accelerator, Scalar, State
from orchestrator.core.plan import TOOK, PastRow
from orchestrator.core.settings import as_declared
from orchestrator.store.reader import read_rows

_AS_THEY_ARE = (
    *("job_id", "attempt_number", "final", "emulated", "workload", "model", "precision"),
    *("batch_size", "cards", "load_s", "queued_s"),
)
_COLUMNS = (
    *_AS_THEY_ARE,
    *("state", "engine", "accelerator", "parameters", "reason", "details"),
    *("started_at", "ended_at", "recorded_at"),
)


def past_rows(directory: Path, *, whole: bool = False) -> list[PastRow]:
    """Rows in a directory, oldest first; with ``whole``, StoreError if a file is unreadable now."""
    import pyarrow.compute as pc

    look = read_rows(directory, _COLUMNS)
    if whole:
        look.refuse_unread("what was measured")
    table = look.table()
    took = pc.map_lookup(table["details"], TOOK, "first")
    rows = table.drop_columns("details").append_column(TOOK, took).to_pylist()
    return [_past_row(row) for row in rows]


def cards_of_succeeded(directory: Path) -> Iterator[tuple[str, str, int]]:
    """Job id, node and card index of succeeded single-node rows."""
    columns = ("job_id", "state", "final", "nodes", "card_indices")
    for row in read_rows(directory, columns).table().to_pylist():
        if row["final"] and row["state"] == State.SUCCEEDED and len(row["nodes"] or ()) == 1:
            for index in row["card_indices"] or ():
                yield row["job_id"], row["nodes"][0], index


@lru_cache(maxsize=4096)
def parameters_of(
    workload: str, engine: str, pairs: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, Scalar], ...]:
    """Parse a job's parameters as this version declares them; most rows share them."""
    values = {name: json.loads(text) for name, text in pairs}
    return tuple(sorted(as_declared(workload, engine, values).items()))


def _past_row(row: dict[str, Any]) -> PastRow:
    started, ended = row["started_at"], row["ended_at"]
    return PastRow(
        **{name: row[name] for name in _AS_THEY_ARE},
        state=State(row["state"]),
        accelerator=Accelerator(row["accelerator"]),
        parameters=parameters_of(row["workload"], row["engine"], tuple(row["parameters"] or ())),
        busy_s=(ended - started).total_seconds() if started and ended else None,
        reason=row["reason"] or "",
        took=row["took"] or "",
    )
