"""Utilization, temperature, clock and throttling of a card over a timed part, for its row. Pure.

A mean hides a card that was slowed down for a third of the time, so the ends of the distribution
stand beside it; with fewer than twenty readings they would be a single reading and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from orchestrator.domain.energy import Reading
from workloads.confidence import percentile
from workloads.devices.monitoring.telemetry import CardTelemetry

FEWEST_FOR_PERCENTILES = 20

_FIGURES: Mapping[str, Callable[[CardTelemetry], float | None]] = {
    "utilization_percent": lambda read: read.utilization_percent,
    "temperature_c": lambda read: read.temperature_c,
    "sm_clock_mhz": lambda read: read.sm_clock_mhz,
}


def card_readings(readings: Sequence[Reading], start: float, end: float) -> dict[str, str]:
    """Summarise the readings between two moments as details of a row; empty where there is none."""
    within = [read for at, read in readings if start <= at <= end]
    found = {}
    for name, figure in _FIGURES.items():
        values = [value for read in within if (value := figure(read)) is not None]
        if not values:
            continue
        found[f"{name}_mean"] = f"{fmean(values):.4g}"
        if len(values) >= FEWEST_FOR_PERCENTILES:
            for share in (5, 95):
                found[f"{name}_p{share}"] = f"{percentile(values, share):.4g}"
    used = [read.memory_used_bytes for read in within if read.memory_used_bytes is not None]
    if used:
        found["peak_card_memory_used_bytes"] = str(max(used))
    if power := {read.power_of for read in within if read.power_of}:
        found["power_of"] = " and ".join(sorted(power))
    told = [read.throttled for read in within if read.throttled is not None]
    if told:
        found["throttled"] = _shares(told)
    return found | ({"card_readings": str(len(within))} if found else {})


def _shares(told: Sequence[frozenset[str]]) -> str:
    """Each reason with the share of readings that give it, the most frequent first."""
    counts = {reason: sum(reason in reasons for reasons in told) for reason in set().union(*told)}
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count / len(told):.0%}" for reason, count in ranked) or "never"
