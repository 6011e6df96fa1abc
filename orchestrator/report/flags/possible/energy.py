"""Energy against the time that it should cover, and against what the card may draw."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.possible.card import sheet_for
from orchestrator.report.flags.possible.recount import Check
from orchestrator.report.units import number, seconds

#: Energy that covers less than this share of the timed part does not cover it. Readings of the
#: ends are interpolated.
COVERED = 0.98
#: Mean power may exceed the card's limit for a moment, and never falls far below its idle power.
MOST_POWER, LEAST_POWER = 1.15, 0.02


def _covered(row: Measurement) -> str | None:
    metrics = row.metrics
    if not metrics.power_w or metrics.energy_j is None or metrics.measure_s is None:
        return None
    covered_s = metrics.energy_j / metrics.power_w
    if covered_s < COVERED * metrics.measure_s:
        return (
            f"its energy is that of {seconds(covered_s)}, the timed part took "
            f"{seconds(metrics.measure_s)}"
        )
    if row.started_at is not None and row.ended_at is not None:
        span_s = row.ended_at - row.started_at
        if covered_s > 1.05 * span_s + 2.0:
            return f"its energy is that of {seconds(covered_s)}, it ran {seconds(span_s)}"
    return None


def _power(row: Measurement) -> str | None:
    sheet, power_w = sheet_for(row), row.metrics.power_w
    if sheet is None or sheet.tdp_w is None or power_w is None:
        return None
    limit_w = sheet.tdp_w * row.cards
    if not LEAST_POWER * limit_w <= power_w <= MOST_POWER * limit_w:
        return f"its cards drew {number(power_w)} W; their limit is {number(limit_w)} W"
    return None


CHECKS: tuple[Check, ...] = (_covered, _power)
