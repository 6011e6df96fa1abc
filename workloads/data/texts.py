"""Word lists and sentence patterns of made-up data, each module's in a JSON file of its name."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def texts(name: str) -> dict[str, Any]:
    """The content of ``NAME.json``."""
    told: dict[str, Any] = json.loads(
        files(__package__).joinpath(f"{name}.json").read_text("utf-8")
    )
    return told
