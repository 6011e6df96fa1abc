"""Runs that were made, as far as their durations go.

``python -m benchmarks.past_runs FILE SOURCE DIRECTORY ...`` adds the runs of these directories to a
Parquet file; names of hosts and places are left out. ``results/past_runs/`` has one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.plan import PastRow
from orchestrator.core.settings import as_declared
from orchestrator.core.topology import Node
from orchestrator.store import files as run_files
from orchestrator.store.reader import read_rows
from workloads.base import MeasureSettings

_COLUMNS = (
    *("invocation_id", "workload", "model", "dataset", "accelerator", "cards", "precision"),
    *("engine", "isolation", "parameters", "replicate", "batch_size", "batch_size_requested"),
    *("measure", "state", "final", "emulated", "nodes", "card_indices", "device_name"),
    *("host_cores", "load_s", "queued_s", "started_at", "ended_at"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """An attempt of a past run; seconds since the run's first attempt began."""

    job: Job
    began_s: float
    ended_s: float
    row: PastRow  # as estimates learn from it
    places: tuple[str, ...] = ()  # its cards


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One invocation of a run."""

    name: str
    source: str  # the machine, as far as it matters
    start: str  # ``Start.value``; "" where that is not known
    nodes: tuple[Node, ...]
    processors: int  # of the host; 0: not known
    lead_s: float | None  # from the driver's start to the first attempt
    tail_s: float  # from the last attempt to the driver's end
    began: float  # the first attempt, seconds since the epoch
    attempts: tuple[PastAttempt, ...]

    @property
    def span_s(self) -> float:
        """From the first attempt's start to the last one's end."""
        return max(attempt.ended_s for attempt in self.attempts)


def runs_in(file: Path) -> Iterator[PastRun]:
    """The runs of a file of rows, of this module or of the product."""
    by_invocation: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(file).to_pylist():
        if row["started_at"] and row["ended_at"]:
            by_invocation.setdefault(row["invocation_id"], []).append(row)
    for rows in by_invocation.values():
        rows.sort(key=lambda row: row["started_at"])
        first, last = rows[0], max(row["ended_at"] for row in rows)
        began, ended = first.get("driver_began_at"), first.get("driver_ended_at")
        yield PastRun(
            name=first["run"],
            source=first.get("source") or file.parent.name,
            start=first.get("start") or "",
            nodes=_nodes(rows),
            processors=max(row.get("host_cores") or 0 for row in rows),
            lead_s=(first["started_at"] - began).total_seconds() if began else None,
            tail_s=max(0.0, (ended - last).total_seconds()) if ended else 0.0,
            began=first["started_at"].timestamp(),
            attempts=tuple(_attempt(row, first["started_at"]) for row in rows),
        )


def _nodes(rows: Sequence[Mapping[str, Any]]) -> tuple[Node, ...]:
    """The nodes with those of their cards that are known: all that the driver saw, or those that
    had an attempt."""
    cards: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        places = [(node, row["accelerator"], row["card_indices"] or ()) for node in row["nodes"]]
        for card in row.get("run_cards") or ():
            node, _, place = card.rpartition("/")
            kind = place.rstrip("0123456789")
            places.append((node, kind, (int(place[len(kind) :]),)))
        for node, kind, indices in places:
            cards.setdefault((node, kind), set()).update(indices)
    return tuple(
        Node(
            node_id=node,
            name=node,
            accelerator=Accelerator(kind),
            card_indices=tuple(sorted(indices)),
            emulated=bool(rows[0]["emulated"]),
        )
        for (node, kind), indices in cards.items()
    )


def _attempt(row: Mapping[str, Any], first: datetime) -> PastAttempt:
    wanted = row["batch_size_requested"]
    given = {name: json.loads(text) for name, text in row["parameters"] or ()}
    declared = as_declared(row["workload"], row["engine"], given)
    job = Job(
        experiment="past",
        workload=row["workload"],
        model=row["model"],
        dataset=row["dataset"],
        accelerator=Accelerator(row["accelerator"]),
        cards=row["cards"],
        precision=row["precision"],
        batch_size=int(wanted) if wanted.isdigit() else wanted,
        engine=row["engine"],
        isolation=row["isolation"],
        parameters=tuple(sorted(declared.items())),
        measure=MeasureSettings(**{k: v for k, v in row["measure"].items() if v is not None}),
        replicate=row.get("replicate") or 1,
    )
    began_s, ended_s = ((row[at] - first).total_seconds() for at in ("started_at", "ended_at"))
    past = PastRow(
        job_id=job.job_id,
        state=State(row["state"]),
        final=row["final"],
        emulated=bool(row["emulated"]),
        workload=job.workload,
        model=job.model,
        precision=job.precision,
        batch_size=row["batch_size"],
        accelerator=job.accelerator,
        cards=job.cards,
        parameters=job.parameters,
        measure=job.measure,
        busy_s=ended_s - began_s,
        load_s=row["load_s"],
        queued_s=row.get("queued_s"),
    )
    node = (row["nodes"] or ("",))[0]
    places = tuple(f"{node}/{index}" for index in row["card_indices"] or ())
    return PastAttempt(job=job, began_s=began_s, ended_s=ended_s, row=past, places=places)


# ---------------------------------------------------------------- collecting


def rows_of(directory: Path, source: str) -> list[dict[str, Any]]:
    """The rows of a run's directory, with what else tells of its duration."""
    rows = read_rows(directory / run_files.ROWS, _COLUMNS).table().to_pylist()
    status, kept = _json(directory / run_files.STATUS), _json(directory / run_files.OPTIONS)
    start = "in process" if kept.get("in_process") else "private"
    names: dict[str, str] = {}
    cards = [card["card"].rpartition("/") for card in status.get("cards", ())]
    there = [f"{_renamed(node, names)}/{card}" for node, _, card in cards]
    lasting = _last_invocation(rows, status)
    for row in rows:
        of_last = row["invocation_id"] == lasting
        row |= {
            "run": directory.name,
            "source": source,
            "start": "cluster" if kept.get("address") else start if kept else "",
            "run_cards": there if of_last else [],
            "driver_began_at": _moment(status["started_at"]) if of_last else None,
            "driver_ended_at": _moment(status["at"]) if of_last else None,
            "nodes": [_renamed(node, names) for node in row["nodes"] or ()],
            "parameters": [(name, _shorter(text)) for name, text in row["parameters"] or ()],
            "model": _end(row["model"]),
            "dataset": _end(row["dataset"]),
        }
    return rows


def _last_invocation(rows: Iterable[Mapping[str, Any]], status: Mapping[str, Any]) -> str:
    """The invocation that a finished status tells of; "" where it tells of none."""
    began: dict[str, float] = {}
    for row in rows:
        if row["started_at"]:
            at = row["started_at"].timestamp()
            began[row["invocation_id"]] = min(at, began.get(row["invocation_id"], at))
    if not began or not status.get("finished"):
        return ""
    newest = max(began, key=lambda invocation: began[invocation])
    return newest if began[newest] >= status["started_at"] else ""


def _renamed(node: str, names: dict[str, str]) -> str:
    return names.setdefault(node, f"node-{len(names)}")


def _shorter(text: str) -> str:
    value = json.loads(text)
    return json.dumps(_end(value) if isinstance(value, str) else value)


def _end(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def main(file: Path, source: str, directories: Sequence[Path]) -> None:
    """Add the runs of directories to a file, those that it does not have."""
    rows = pq.read_table(file).to_pylist() if file.exists() else []
    known = {row["invocation_id"] for row in rows}
    for directory in directories:
        found = [row for row in rows_of(directory, source) if row["started_at"]]
        rows += [row for row in found if row["invocation_id"] not in known]
        known |= {row["invocation_id"] for row in found}
    pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [Path(name) for name in sys.argv[3:]])
