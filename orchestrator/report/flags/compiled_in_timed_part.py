"""``compiled_in_timed_part``: a row whose clock ran while graphs were compiled."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag


def _reason(row: Measurement) -> str | None:
    if not row.timed_compilations:
        return None
    graphs = (
        "1 graph was" if row.timed_compilations == 1 else f"{row.timed_compilations} graphs were"
    )
    again = " once more" if (row.timed_parts or 1) > 1 else ""
    return f"{graphs} compiled while it was timed{again}; a steady row compiles none"


SPEC = Flag(
    name="compiled_in_timed_part",
    description="Graphs were compiled while it was timed, which is no speed of the model.",
    reason=_reason,
)
