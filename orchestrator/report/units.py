"""Numbers as people read them: four significant figures, thousands separated, always a unit.

A benchmark's tables are compared by eye, so the same quantity is written the same way in the
terminal, the page and the Markdown. Sizes use binary prefixes (1 GiB = 2^30 bytes), because that
is what devices report; rates use plain digits, because ratios matter there.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone

MISSING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """``value`` with at least ``digits`` significant figures and thousands separated by commas.

    Digits before the decimal point are never rounded away: 13,377 stays 13,377.
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # 0.99996 is 1.000, not 1.0000
    magnitude = math.floor(math.log10(abs(rounded)))
    decimals = digits - 1 - magnitude
    if decimals <= 0:
        return f"{value:,.0f}"
    return f"{value:,.{min(decimals, 9)}f}"


def seconds(value: float | None) -> str:
    """A duration: µs, ms and s with three figures, then minutes and hours."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0:
        return f"-{seconds(-value)}"
    if value == 0:
        return "0 s"
    if value < 0.9995e-3:
        return f"{number(value * 1e6, 3)} µs"
    if value < 0.9995:
        return f"{number(value * 1e3, 3)} ms"
    if value < 59.95:
        return f"{number(value, 3)} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(value / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def size(value: float | None) -> str:
    """A number of bytes, in the largest binary unit that leaves at least 1."""
    if value is None or not math.isfinite(value):
        return MISSING
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1023.5 or unit == "TiB":
            return f"{amount:.0f} B" if unit == "B" else f"{number(amount, 3)} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def percent(value: float | None, digits: int = 2) -> str:
    """A ratio as per cent."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{number(value * 100, digits)}%"


def times(value: float | None) -> str:
    """A factor: ``1.52×``, with two decimals below ten."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.2f}×" if value < 9.995 else f"{number(value, 3)}×"


def moment(value: float | None) -> str:
    """Seconds since the epoch as a UTC date and time."""
    if value is None or not math.isfinite(value):
        return MISSING
    return datetime.fromtimestamp(value, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(count: int, noun: str, many: str = "") -> str:
    """``1 job``, ``2,000 jobs``."""
    return f"{count:,} {noun if count == 1 else (many or noun + 's')}"


def listed(words: list[str], limit: int = 4) -> str:
    """The words joined by commas; what exceeds ``limit`` is counted."""
    if len(words) <= limit:
        return ", ".join(words)
    return f"{', '.join(words[: limit - 1])} and {len(words) - limit + 1:,} more"
