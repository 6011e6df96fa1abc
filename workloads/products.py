"""Products that jobs keep under a name for others: models, adapters, calibrations. No torch here.

A name may come to stand for something else, when a job saves it anew. What was loaded or measured
before that is of another product.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from workloads.models.saved import ORIGIN, SAVED_BY, models_root, origin_of
from workloads.onnx_graphs.calibrations import calibrations_root
from workloads.training.adapters import adapters_root

#: The directory of each kind's names, on this machine.
_ROOTS: dict[str, Callable[[], Path]] = {
    "model": models_root,
    "adapter": adapters_root,
    "calibration": calibrations_root,
}


def made_at(kind: str, name: object) -> float | None:
    """Seconds since the epoch at which a job made what has a name now, by the clock of the file
    system's host; None where none did, or nothing of it is known on this machine."""
    if kind not in _ROOTS or not isinstance(name, str):
        return None
    try:
        # Text, not paths, which cost five times as much: every job asks.
        return os.stat(os.path.join(_ROOTS[kind](), os.path.expanduser(name), ORIGIN)).st_mtime
    except (OSError, ValueError, RuntimeError):
        return None


def saved_by(kind: str, name: str) -> str:
    """Ids of the run and the job that saved what has a name now (``Request.saved_by``); "" where
    its note does not say, as those of older versions, or none can be read here."""
    return str(origin_of(_ROOTS[kind]() / name).get(SAVED_BY, "")) if kind in _ROOTS else ""
