"""``not_steady``: a row that was timed before its steps were steady, or while they drifted."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag
from workloads.steadiness import TOLERANCE


def _reason(row: Measurement) -> str | None:
    if row.warmup_end == "limit":
        unmet = (
            f" before {row.shapes_unmet} of {row.shapes} shapes were met"
            if row.shapes and row.shapes_unmet
            else ""
        )
        return f"its warm-up was cut by warmup_limit_s ({row.measure.warmup_limit_s:g} s){unmet}"
    drift = row.metrics.drift
    if drift is not None and abs(drift) > TOLERANCE:
        how = (
            f"a slow beginning makes the timed part {drift:.0%} slower"
            if drift > 0
            else f"its steps became slower, by {-2 * drift:.0%} from the first half to the second"
        )
        return f"{how}; at most {TOLERANCE:.0%} is steady"
    return None


SPEC = Flag(
    name="not_steady",
    description="It was timed before its warm-up was over, or while its steps drifted.",
    reason=_reason,
)
