"""``two_humped``: a row whose repeats are of two speeds."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag

#: The faster speed over the slower below which two humps do no harm.
MOST = 1.05


def _reason(row: Measurement) -> str | None:
    ratio = row.metrics.hump_ratio
    if ratio is None or ratio <= MOST:
        return None
    return f"its repeats are of two speeds, one {ratio:.2f} times the other"


SPEC = Flag(
    name="two_humped",
    description="Its repeats are of two speeds (SigClust's cluster index at 1 %, and more than 5 % "
    "apart), so that its mean is a speed that hardly a repeat had.",
    reason=_reason,
)
