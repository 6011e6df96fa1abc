"""Variables of this process's environment: set for a while, or looked at as they are kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


def environment_bytes() -> dict[bytes, bytes]:
    """The environment of this process as it is now. Python keeps it as bytes, and on any other way
    to it decodes or encodes every variable."""
    kept = vars(os.environb).get("_data")
    return kept.copy() if type(kept) is dict else dict(os.environb)


@contextlib.contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset) for the block; afterwards they are as they were before it."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
