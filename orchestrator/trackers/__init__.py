"""Programs that follow experiments, such as MLflow: each gets one run for each job of ours.

Each file here declares one in its ``SPEC``, under the file's name; another installed package can
declare one under the entry points ``nightgrid.trackers``. ``nightgrid export --to NAME`` writes
what was measured, ``nightgrid run --log-to NAME`` every row as it comes (``runtime/row_log.py``).
"""

from __future__ import annotations

from orchestrator.core.errors import StoreError
from orchestrator.trackers.base import Tracker
from workloads.registry import Declared

#: Every tracker by name.
TRACKERS: Declared[Tracker] = Declared(__name__, Tracker, "nightgrid.trackers")


def tracker_of(text: str) -> tuple[Tracker, str]:
    """The tracker and the destination that ``NAME`` or ``NAME=DESTINATION`` names.

    Raises:
        StoreError: there is no such tracker, or no destination is known.
        ExtraMissing: its package is not installed.
    """
    name, _, destination = text.partition("=")
    if name not in TRACKERS:
        raise StoreError(f"no rows can be logged to {name!r}; there is: {', '.join(TRACKERS)}")
    tracker = TRACKERS[name]
    return tracker, tracker.destination_of(destination)
