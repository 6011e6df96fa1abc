"""Atlas of a grid: its cells, and where each has been run.

No site has all cards, so sites exchange *bundles* (JSON): a cell is run by nobody, emulated (the
card's libraries without a card) or on a card. Cells match by job id, rows by invocation and
attempt; merging is idempotent and commutative.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from math import isfinite
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from orchestrator.core.errors import StoreError
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement

FORMAT = "nightgrid-atlas-1"
NOBODY = "nobody"
EMULATED: Literal["emulated"] = "emulated"
CARD: Literal["card"] = "card"
#: In ascending order.
STATUSES = (NOBODY, EMULATED, CARD)

#: Largest bundle that is read; a few thousand rows take some megabytes.
LARGEST_BYTES = 256 * 2**20

_LONGEST = 500  # characters of a reason
_OF_JOB = ("job_id", "experiment", "model", "engine", "precision", "cards")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Evidence:
    """One final row of a cell."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True, allow_inf_nan=False)
    invocation_id: str
    attempt_id: str
    status: Literal["emulated", "card"]
    state: str
    date: str  # of the day, UTC
    device_name: str
    reason: str
    throughput: float | None
    unit: str
    random_weights: bool
    software: tuple[str, ...]  # "torch 2.10.0", …

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the row across sites."""
        return self.invocation_id, self.attempt_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One job of the grid, and its evidence."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True)
    job_id: str
    experiment: str
    model: str
    engine: str
    precision: str
    accelerator: str
    cards: int
    batch_size: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def status(self) -> str:
        """Best status of its evidence."""
        return max((one.status for one in self.evidence), key=STATUSES.index, default=NOBODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Atlas:
    """The cells of a grid, in its order."""

    grid: str
    cells: tuple[Cell, ...]

    def counts(self) -> dict[str, int]:
        """Number of cells by status."""
        counted = Counter(cell.status for cell in self.cells)
        return {status: counted[status] for status in reversed(STATUSES)}


def atlas_of(grid: str, jobs: Iterable[Job], rows: Iterable[Measurement]) -> Atlas:
    """Return a grid's cells with evidence; host-only emulation and unsupported jobs are none."""
    by_job: dict[str, dict[tuple[str, str], Evidence]] = {}
    for row in rows:
        status = _status(row)
        if row.final and status is not None and row.state is not State.UNSUPPORTED:
            evidence = _evidence(row, status)
            by_job.setdefault(row.job_id, {})[evidence.key] = evidence
    cells = (
        Cell(
            **{name: getattr(job, name) for name in _OF_JOB},
            accelerator=str(job.accelerator),
            batch_size=str(job.batch_size),
            evidence=tuple(sorted(by_job.get(job.job_id, {}).values(), key=_order)),
        )
        for job in jobs
    )
    return Atlas(grid=grid, cells=tuple(cells))


def merged(one: Atlas, *others: Atlas) -> Atlas:
    """Merge atlases with all evidence; raise StoreError for different grids."""
    cells: dict[str, list[Cell]] = {cell.job_id: [cell] for cell in one.cells}
    theirs: dict[str, list[Cell]] = {}
    for other in others:
        if other.grid != one.grid:
            raise StoreError(f"an atlas of {other.grid} cannot be merged into one of {one.grid}")
        for cell in other.cells:
            known = cells.get(cell.job_id)
            (theirs.setdefault(cell.job_id, []) if known is None else known).append(cell)
    every = [*cells.values(), *(theirs[job_id] for job_id in sorted(theirs))]
    united = []
    for group in every:
        # Of conflicting copies the last in order stays, whatever the order of merging.
        rows = sorted((row for cell in group for row in cell.evidence), key=_order)
        rows = sorted({row.key: row for row in rows}.values(), key=_order)
        first = max(group, key=lambda cell: repr({**asdict(cell), "evidence": ()}))
        united.append(replace(first, evidence=tuple(rows)))
    return Atlas(grid=one.grid, cells=tuple(united))


def _order(evidence: Evidence) -> tuple[Any, ...]:
    return tuple(repr(value) for value in asdict(evidence).values())


def _status(row: Measurement) -> Literal["emulated", "card"] | None:
    """Return where a row ran; None if it is no evidence about a card."""
    if row.attempt_number == 0 or not row.device_name:
        return None  # it never ran
    if not row.emulated:
        return CARD
    product = row.device_name.partition(" (")[0]  # names of host emulation have brackets
    named = product != row.device_name and row.accelerator.spec.product(product)
    return EMULATED if named else None


def _evidence(row: Measurement, status: Literal["emulated", "card"]) -> Evidence:
    at = row.recorded_at if row.recorded_at is not None else row.ended_at
    day = datetime.fromtimestamp(at or 0, tz=timezone.utc).date().isoformat()
    packages = {*row.accelerator.spec.packages, "torch", "transformers", row.engine, "nightgrid"}
    throughput = row.metrics.throughput
    return Evidence(
        invocation_id=row.invocation_id,
        attempt_id=row.attempt_id,
        status=status,
        state=str(row.state),
        date=day,
        device_name=row.device_name or "",
        reason="" if row.state is State.SUCCEEDED else row.reason[:_LONGEST],
        throughput=throughput if throughput is not None and isfinite(throughput) else None,
        unit=row.metrics.throughput_unit or "",
        random_weights=bool(row.random_weights),
        software=tuple(sorted(f"{n} {v}" for n, v in row.versions.items() if n in packages)),
    )


# ---------------------------------------------------------------- the bundle


def to_json(atlas: Atlas) -> str:
    """Return the bundle's text; equal atlases have equal texts."""
    cells = [{"status": cell.status, **asdict(cell)} for cell in atlas.cells]
    whole = {"format": FORMAT, "grid": atlas.grid, "counts": atlas.counts(), "cells": cells}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str, name: str) -> Atlas:
    """Parse an untrusted bundle of file ``name``; raise StoreError if it is invalid."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{name} is not a valid atlas bundle: {error}") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        version = whole.get("format") if isinstance(whole, dict) else type(whole).__name__
        raise StoreError(
            f"{name} is not an atlas bundle of this version: format is {version!r}, not {FORMAT!r}"
        )
    try:
        atlas = TypeAdapter(Atlas).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(f"{name}: {where}: {first['msg']}, not {first['input']!r:.200}") from None
    if len({cell.job_id for cell in atlas.cells}) != len(atlas.cells):
        raise StoreError(f"{name}: a cell stands there twice")
    return atlas
