"""Hostile text made harmless for each medium that the report is printed in.

Failure texts, model outputs and names come from code and models that nobody vetted. Control
characters could rewrite a terminal, ``</script>`` could end the page's data, a leading ``=``
could become a spreadsheet formula, a ``|`` could tear a Markdown table. HTML itself is escaped by
the template engine.
"""

from __future__ import annotations

import json
import math
import re

from orchestrator.host.visible import visible as visible

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&])")


def one_line(text: str, limit: int = 0) -> str:
    """The text on one line, cut to ``limit`` characters with an ellipsis if ``limit`` is set."""
    line = " ".join(visible(text).split())
    return line if not limit or len(line) <= limit else line[: limit - 1].rstrip() + "…"


def tail(text: str, limit: int) -> str:
    """The last ``limit`` characters, from the start of a line where there is one."""
    text = visible(text).strip("\n")
    if len(text) <= limit:
        return text
    end = text[-limit:]
    newline = end.find("\n")
    return "…\n" + (end[newline + 1 :] if 0 <= newline < limit // 2 else end)


def markdown(text: str) -> str:
    """One line of Markdown text in which nothing has a meaning."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def csv_field(text: str) -> str:
    """The text as a spreadsheet shows it and does not compute it."""
    text = visible(text)
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t") else text


def script_json(value: object) -> str:
    """JSON that may stand inside a ``<script>`` element: no character can close it.

    Raises:
        ValueError: a number is not finite; ``finite`` must be applied before.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode()


def finite(value: float | int | None, digits: int = 6) -> float | int | None:
    """The number with ``digits`` significant figures, or None where JSON has no word for it."""
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, int) or value == int(value):
        return int(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded
