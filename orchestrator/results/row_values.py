"""Values of a measurement as its row holds them, and the fields that are no plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from orchestrator.core.measurement import Measurement
from orchestrator.results.schema import RAW_TYPES, TIMES, hints_of

_json = json.JSONEncoder(separators=(",", ":")).encode


def text(value: str) -> str:
    """Valid Unicode: an undecodable byte of a log becomes an escape instead of an error."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def scalar(value: Any) -> Any:
    """A plain value: of a choice its text, of a tuple a list."""
    if type(value) is str:
        return text(value)
    if isinstance(value, str):  # of a choice
        return str(value)
    return [scalar(item) for item in value] if isinstance(value, tuple) else value


def json_text(value: Any) -> str:
    """The value of a parameter: JSON, since they have several types."""
    return _json(text(value) if type(value) is str else value)


@lru_cache(maxsize=1)
def mappings() -> tuple[str, ...]:
    """The fields that map texts to texts."""
    hints = hints_of(Measurement).items()
    return tuple(name for name, hint in hints if hint == Mapping[str, str])


@lru_cache(maxsize=1)
def other_columns() -> frozenset[str]:
    """The fields of a measurement that are converted in a way of their own."""
    others = ("metrics", "measure", "parameters", "workload_metrics")
    return frozenset({*TIMES, *RAW_TYPES, *mappings(), *others})
