"""``disturbed``: a row whose process had to share the processors that it computed on."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag

#: Share of the timed part that a process may be kept from running.
MOST = 0.05


def _reason(row: Measurement) -> str | None:
    # Threads that are more than the cores wait for each other, which another flag tells.
    waited = 0.0 if row.oversubscribed else row.processor_wait_share or 0.0
    stolen = row.stolen_share or 0.0
    # What a hypervisor takes is lost to a process only while it runs.
    lost = waited + stolen * min(1.0, row.processor_cores or 0.0)
    if not lost > MOST:
        return None
    told = (
        (waited, f"it waited for a processor for {waited:.0%} of its timed part"),
        (stolen, f"{stolen:.0%} of the host's processor time was stolen"),
    )
    parts = [text for share, text in told if share >= 0.005]
    return f"{' and '.join(parts)}; the most is {MOST:.0%}"


SPEC = Flag(
    name="disturbed",
    description="Something else had the processors while its process wanted to run, or the "
    "hypervisor did.",
    reason=_reason,
)
