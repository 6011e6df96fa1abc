"""``suspect``: a row whose figures cannot be true."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag
from orchestrator.report.flags.possible import contradictions


def _reason(row: Measurement) -> str | None:
    found = list(contradictions(row))
    if not found:
        return None
    more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
    return found[0] + more


SPEC = Flag(
    name="suspect",
    description="Its figures cannot be true: they exceed what the card can do, or contradict each "
    "other.",
    reason=_reason,
)
