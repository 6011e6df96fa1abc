"""Calibrations on disk: the ranges of a graph's activations, by name. No torch: the plan asks.

They lie under ``NIGHTGRID_CALIBRATIONS``, else under ``calibrations`` in the node's cache; nodes
that share no cache need the variable set to storage that all of them see.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import DataMissing
from workloads.models.products import ORIGIN, product_root

RANGES = "ranges.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The ranges of one graph's activations."""

    ranges: Path
    graph: str  # identity of the graph that was measured, the same on all nodes
    origin: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Changes when the ranges do."""
        return hashlib.sha256(self.ranges.read_bytes()).hexdigest()[:16]


def calibrations_root() -> Path:
    """The directory of all calibrations on this machine; need not exist."""
    return product_root("calibration")


def find_calibration(name: str) -> Calibration:
    """The calibration of a name.

    Raises:
        DataMissing: there is none; the message says where it was looked for.
    """
    directory = calibrations_root() / name
    try:
        origin = json.loads((directory / ORIGIN).read_text(encoding="utf-8"))
        return Calibration(
            ranges=directory / RANGES, graph=str(origin["measured"]), origin=dict(origin)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        there = sorted(file.parent.name for file in calibrations_root().glob(f"*/{ORIGIN}"))
        close = difflib.get_close_matches(name, there, n=2, cutoff=0.5)
        known = f"; did you mean {' or '.join(close)}?" if close else ""
        raise DataMissing(
            f"no calibration {name!r} in {directory.parent} on this machine{known} A job of "
            f"onnx-calibration keeps one with save_calibration: {name}; nodes without shared "
            "storage need NIGHTGRID_CALIBRATIONS on storage that all of them see"
        ) from error
