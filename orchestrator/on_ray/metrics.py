"""A run's figures for Prometheus, through Ray's own exporter (prefix ``ray_``).

All are gauges of a status's totals, so missed scrapes and restarts lose nothing. A throughput is
named by its workload's unit. ``docs/grafana/nightgrid.json`` draws these names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.status import RunStatus

#: Ray sends what was recorded every ten seconds (``metrics_report_interval_ms``).
INTERVAL_S = 5.0
#: Prefix that Ray puts before each name.
PREFIX = "ray_"

#: By name: tags beside ``run``, and description. Throughputs are not included.
METRICS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "nightgrid_jobs": (("state",), "Jobs by state; state REMAINING: not terminal yet"),
    "nightgrid_attempts": ((), "Attempts that have ended, probes and retries included"),
    "nightgrid_failures": (("failure_class",), "Attempts that failed, by class of failure"),
    "nightgrid_cards": ((), "Cards of the run"),
    "nightgrid_cards_busy": ((), "Cards with an attempt on them"),
    "nightgrid_cards_emulated": ((), "1 when any card is emulated: no figure is a real card's"),
    "nightgrid_paused": ((), "1 while nothing new is started, since results have no room"),
    "nightgrid_jobs_per_h": ((), "Jobs that were run, by the hour"),
    "nightgrid_eta_s": ((), "Estimated seconds until the run ends"),
    "nightgrid_status_at_s": ((), "When the driver recorded this, seconds since the epoch"),
    "nightgrid_card_power_w": (("card",), "Power of a card, read from outside its process"),
    "nightgrid_card_temperature_c": (("card",), "Temperature of a card"),
    "nightgrid_card_utilization_percent": (("card",), "Share of time with work on a card"),
    "nightgrid_card_memory_used_bytes": (("card",), "Memory in use on a card"),
}
_CARD_FIELDS = ("power_w", "temperature_c", "utilization_percent", "memory_used_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One value of one metric, with its tags beside ``run``."""

    name: str
    value: float
    tags: Mapping[str, str]


def rate_name(unit: str) -> str:
    """The name of a throughput: ``tokens/s`` -> ``nightgrid_tokens_per_s``."""
    return "nightgrid_" + re.sub(r"\W+", "_", unit.replace("/", "_per_"), flags=re.ASCII)


def readings_of(status: RunStatus) -> Iterator[Reading]:
    """Every figure of a status that is known."""

    def reading(name: str, value: float, **tags: str) -> Reading:
        return Reading(name=name, value=float(value), tags=tags)

    for state, count in status.counts.items():
        yield reading("nightgrid_jobs", count, state=state)
    yield reading("nightgrid_jobs", status.total - status.done, state="REMAINING")
    yield reading("nightgrid_attempts", status.attempts)
    for failure_class, count in status.failure_counts.items():
        yield reading("nightgrid_failures", count, failure_class=failure_class)
    yield reading("nightgrid_cards", len(status.cards))
    yield reading("nightgrid_cards_busy", status.assigned)
    yield reading("nightgrid_cards_emulated", status.emulated)
    yield reading("nightgrid_paused", bool(status.paused))
    for rate in status.rates:
        yield reading(rate_name(rate.unit), rate.per_s)
    if status.jobs_per_h is not None:
        yield reading("nightgrid_jobs_per_h", status.jobs_per_h)
    if status.eta_s is not None:
        yield reading("nightgrid_eta_s", 0.0 if status.finished else status.eta_s)
    yield reading("nightgrid_status_at_s", status.at)
    for card in status.cards:
        for field in _CARD_FIELDS:
            if (value := getattr(card, field)) is not None:
                yield reading(f"nightgrid_card_{field}", value, card=card.card)


class Publisher:
    """Records the figures of one run in a process that has joined a Ray cluster."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # never set back, as the time of a status may be
        self._gauges: dict[str, Any] = {}
        self._next_at = 0.0

    def publish(self, status: RunStatus) -> None:
        """Record a status, every few seconds and at the end."""
        now = self._clock()
        if now < self._next_at and not status.finished:
            return
        from ray.util.metrics import Gauge

        self._next_at = now + INTERVAL_S
        for reading in readings_of(status):
            name = reading.name
            if name not in self._gauges:
                tags, description = METRICS.get(
                    name, ((), "Throughput of the finished jobs while timed")
                )
                self._gauges[name] = Gauge(name, description, tag_keys=("run", *tags))
            self._gauges[name].set(reading.value, {"run": status.run, **reading.tags})
