"""``drifting``: a row whose speed changed steadily while it was measured."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag

#: Relative change from the first repeat to the last below which a trend does no harm.
MOST = 0.05


def _reason(row: Measurement) -> str | None:
    drift = row.metrics.drift
    if drift is None or abs(drift) <= MOST:
        return None
    return f"its speed changed by {drift:+.1%} from the first repeat to the last"


SPEC = Flag(
    name="drifting",
    description="Its speed rose or fell steadily over the repeats (Mann and Kendall's test at 1 %, "
    "and more than 5 % from first to last), so that its mean is of no settled state.",
    reason=_reason,
)
