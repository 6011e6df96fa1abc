"""``oversubscribed``: a row of a job that had more threads than its host has cores."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag


def _reason(row: Measurement) -> str | None:
    if not row.oversubscribed:
        return None
    threads = f" of {row.threads} threads" if row.threads else ""
    cores = f" on a host of {row.host_cores} cores" if row.host_cores else ""
    return f"{row.cards} processes{threads}{cores}: they waited for each other"


def _league(row: Measurement) -> str:
    return f"oversubscribed, {row.cards} cards"


SPEC = Flag(
    name="oversubscribed",
    description="Its processes had more threads than their host has cores.",
    reason=_reason,
    league=_league,
)
