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

_COLUMNS = (
    "job_id",
    "attempt_number",
    "state",
    "final",
    "emulated",
    "workload",
    "model",
    "precision",
    "batch_size",
    "engine",
    "accelerator",
    "cards",
    "parameters",
    "load_s",
    "queued_s",
    "reason",
    "started_at",
    "ended_at",
    "recorded_at",
    "details",
)


def past_rows(directory: Path, *, whole: bool = False) -> list[PastRow]:
    """The rows in a directory, oldest first.

    Args:
        whole: none may lack for the moment.

    Raises:
        StoreError: a file cannot be read now that may have some, and all are wanted.
    """
    import pyarrow.compute as pc

    look = read_rows(directory, _COLUMNS)
    if whole:
        look.refuse_unread("what was measured")
    table = look.table()
    took = pc.map_lookup(table["details"], TOOK, "first")
    rows = table.drop_columns("details").append_column(TOOK, took).to_pylist()
    return [_past_row(row) for row in rows]


def cards_of_succeeded(directory: Path) -> Iterator[tuple[str, str, int]]:
    """Job id, node and index of each card on which a job of these rows has succeeded. Rows whose
    cards are those of several nodes are left out."""
    columns = ("job_id", "state", "final", "nodes", "card_indices")
    for row in read_rows(directory, columns).table().to_pylist():
        if row["final"] and row["state"] == State.SUCCEEDED and len(row["nodes"] or ()) == 1:
            for index in row["card_indices"] or ():
                yield row["job_id"], row["nodes"][0], index


@lru_cache(maxsize=4096)
def parameters_of(
    workload: str, engine: str, pairs: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, Scalar], ...]:
    """Parameters of a job from their JSON, as a job of this version has them; most rows share
    theirs with others."""
    said = {name: json.loads(text) for name, text in pairs}
    return tuple(sorted(as_declared(workload, engine, said).items()))


def _past_row(row: dict[str, Any]) -> PastRow:
    started, ended = row["started_at"], row["ended_at"]
    return PastRow(
        job_id=row["job_id"],
        state=State(row["state"]),
        final=row["final"],
        emulated=row["emulated"],
        workload=row["workload"],
        model=row["model"],
        precision=row["precision"],
        batch_size=row["batch_size"],
        accelerator=Accelerator(row["accelerator"]),
        cards=row["cards"],
        parameters=parameters_of(row["workload"], row["engine"], tuple(row["parameters"] or ())),
        busy_s=(ended - started).total_seconds() if started and ended else None,
        load_s=row["load_s"],
        queued_s=row["queued_s"],
        reason=row["reason"] or "",
        took=row["took"] or "",
        attempt_number=row["attempt_number"],
    )
