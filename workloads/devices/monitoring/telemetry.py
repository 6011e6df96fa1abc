"""Telemetry of a card, read from outside the process that owns it.

A process that holds a card cannot be asked while it computes, and asking from within would disturb
what it measures; on Gaudi it would even acquire the card. Vendors' tools (NVML, hl-smi) read the
same counters from outside. Whatever a tool does not say stays None: an unknown power is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTelemetry:
    """One card at one moment; every value may be unknown.

    ``energy_j`` is the card's own counter, which starts when the driver is loaded: only the
    difference of two readings means something.
    """

    power_w: float | None = None
    power_of: str = ""  # what is in that figure, where a card has several
    energy_j: float | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None  # share of time with work on the card, 0 to 100
    sm_clock_mhz: float | None = None  # of the units that compute; on Gaudi its MMEs
    #: Why the clock is lower than it could be, in NVML's words; empty: it is not held back.
    throttled: frozenset[str] | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardInventory:
    """A card's product, and its links to the other cards of its server."""

    product: str = ""  # as its vendor's tool calls it
    links: int | None = None  # that there are
    links_up: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has a card open."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


def number(text: str) -> float | None:
    """A figure as vendors' tools print it; None for ``[N/A]``, ``[Not Supported]`` and the like."""
    try:
        value = float(text.strip())
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None
