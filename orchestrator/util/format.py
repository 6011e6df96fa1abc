"""Human-readable numbers, and sanitised text.

Sizes use binary prefixes, like devices; rates use plain digits. Failure texts, model outputs and
names are untrusted: control characters could rewrite a terminal, ``</script>`` end the page's data,
a leading ``=`` start a spreadsheet formula, a ``|`` break a Markdown table.
"""

from __future__ import annotations

import json
import math
import re
from datetime import datetime, timezone

from orchestrator.util.output import visible as visible

MISSING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Format to ``digits`` significant figures or more: 13,377 is never rounded."""
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
    """Format a duration: µs, ms and s with three figures, then minutes, hours and days."""
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


def duration(seconds: float) -> str:
    """Format as ``42s``, ``3m05s``, ``2h07m``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def size(value: float | None) -> str:
    """Format bytes in the largest binary unit that leaves at least 1."""
    if value is None or not math.isfinite(value):
        return MISSING
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1023.5 or unit == "TiB":
            return f"{amount:.0f} B" if unit == "B" else f"{number(amount, 3)} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def percent(value: float | None, digits: int = 2) -> str:
    """Format a ratio as per cent."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{number(value * 100, digits)}%"


def times(value: float | None) -> str:
    """Format a factor: ``1.52×``, with two decimals below ten."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.2f}×" if value < 9.995 else f"{number(value, 3)}×"


def moment(value: float | None) -> str:
    """Format seconds since the epoch as a UTC date and time."""
    if value is None or not math.isfinite(value):
        return MISSING
    return datetime.fromtimestamp(value, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def scalar(value: str | float | bool | None) -> str:
    """Format a parameter's value as in a grid file."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def plural(count: int, noun: str, many: str = "") -> str:
    """Format as ``1 job``, ``2,000 jobs``."""
    return f"{count:,} {noun if count == 1 else (many or noun + 's')}"


def listed(words: list[str], limit: int = 4) -> str:
    """Join words by commas; those beyond ``limit`` are counted."""
    if len(words) <= limit:
        return ", ".join(words)
    return f"{', '.join(words[: limit - 1])} and {len(words) - limit + 1:,} more"


# ---------------------------------------------------------------- untrusted text

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&])")


def one_line(text: str, limit: int = 0) -> str:
    """Return the text on one line, cut to ``limit`` characters if that is set."""
    line = " ".join(visible(text).split())
    return line if not limit or len(line) <= limit else line[: limit - 1].rstrip() + "…"


def tail(text: str, limit: int) -> str:
    """Return the last ``limit`` characters, from a line start if possible."""
    text = visible(text).strip("\n")
    if len(text) <= limit:
        return text
    end = text[-limit:]
    newline = end.find("\n")
    return "…\n" + (end[newline + 1 :] if 0 <= newline < limit // 2 else end)


def markdown(text: str) -> str:
    """Return one line of Markdown text with all markup escaped."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def csv_field(text: str) -> str:
    """Return the text such that a spreadsheet shows it but never computes it."""
    text = visible(text)
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t") else text


def script_json(value: object) -> str:
    """Return JSON safe inside ``<script>``; raise ValueError for numbers that are not finite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode()


def finite(value: float | int | None, digits: int = 6) -> float | int | None:
    """Round to ``digits`` significant figures; None if not finite, as JSON has no NaN."""
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, int) or value == int(value):
        return int(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded
