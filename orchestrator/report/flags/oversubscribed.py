"""``oversubscribed``: a row of a job that had more threads than its host has cores."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag
from orchestrator.report.units import plural


def _reason(row: Measurement) -> str | None:
    if not row.oversubscribed:
        return None
    threads = f" of {plural(row.threads, 'thread')}" if row.threads else ""
    cores = f" on a host of {plural(row.host_cores, 'core')}" if row.host_cores else ""
    many = plural(row.cards, "process", "processes")
    return f"{many}{threads}{cores}: threads waited for each other"


def _league(row: Measurement) -> str:
    return f"oversubscribed, {row.cards} cards"


SPEC = Flag(
    name="oversubscribed",
    description="Its processes had more threads than their host has cores.",
    reason=_reason,
    league=_league,
)
