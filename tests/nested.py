"""Walking through documents of mappings and lists, as YAML and JSON have them."""

from __future__ import annotations

from typing import Any


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, ...]] = []
    if isinstance(value, dict):
        inner = [p for key, item in value.items() for p in places(item, (*path, key))]
    elif isinstance(value, list):
        inner = [p for index, item in enumerate(value) for p in places(item, (*path, index))]
    return [*inner, path]
