"""``suspect``: a row whose figures no card of its kind can reach."""

from __future__ import annotations

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag
from orchestrator.report.reference_data import reference
from orchestrator.report.roofline import share_of, sheet_of

#: Shares of a data sheet's limits above which a figure is not believed. Clocks vary a little, and a
#: sheet's figures are rounded.
MOST = 1.02


def _reason(row: Measurement) -> str | None:
    if row.emulated or not row.device_name:
        return None
    sheet = sheet_of(row.device_name, reference().devices)
    if sheet is None:
        return None
    share = share_of(row, sheet)
    if share.compute is not None and share.compute > MOST:
        of = f"the {share.arithmetic} peak of {sheet.device}"
        return f"its operations are {share.compute:.0%} of {of}"
    if share.bandwidth is not None and share.bandwidth > MOST:
        return f"reading its weights takes {share.bandwidth:.0%} of the bandwidth of {sheet.device}"
    return None


SPEC = Flag(
    name="suspect",
    description="Its figures cannot be true: they exceed what the card can do, or contradict each "
    "other.",
    reason=_reason,
)
