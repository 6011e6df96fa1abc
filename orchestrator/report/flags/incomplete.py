"""``incomplete``: a row whose time limit cut its first repeat."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag


def _reason(row: Measurement) -> str | None:
    if row.metrics.repeats or row.metrics.throughput is None:
        return None
    return f"no repeat was completed within {row.measure.time_limit_s:g} s"


SPEC = Flag(
    name="incomplete",
    description="No repeat was completed in time: its rate is of some batches, without an "
    "interval.",
    reason=_reason,
)
