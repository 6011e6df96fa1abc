"""One fault as it was injected: the record by which losses are explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: All workers of the node die of these.
_OF_NODES = ("kill a raylet", "kill a spawner", "kill a node's agent", "freeze a raylet")


@dataclass(slots=True, kw_only=True)
class Fault:
    """A fault: its kind, its time and its target."""

    kind: str
    at: float  # seconds since the epoch
    until: float | None = None  # when its effect ended, if it lasted
    node: str = ""
    card: int | None = None
    pid: int | None = None  # of the worker process, or of the driver, that it hit
    offset_s: int = 0  # by which the driver's clock was wrong until then
    note: str = ""

    @property
    def hits_node(self) -> bool:
        """Return whether all workers of the node die of it."""
        return self.kind in _OF_NODES

    @property
    def ended_at(self) -> float:
        """The last moment of its effect."""
        return self.at if self.until is None else self.until


def by_kind(faults: Sequence[Fault]) -> dict[str, int]:
    """Count those of each kind, the most frequent first."""
    counts: dict[str, int] = {}
    for fault in faults:
        counts[fault.kind] = counts.get(fault.kind, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def injected(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """The faults as plain values, for a file."""
    return [asdict(fault) for fault in faults]
