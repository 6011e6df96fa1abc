"""Checks whether the figures of a row are possible. Each check is a pure function of stored facts.

A check answers with a sentence that names the figure and its limit, or with None: the row passes,
or a fact that would tell is not known. Where the raw samples were not read, the checks that need
them pass. Limits leave room for what honest rows differ by (rounded data sheets, clocks that are
read one after the other), so that a row that fails was not measured as it says.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.possible import card, counts, energy, figures, times
from orchestrator.report.flags.possible.recount import Check, RawCheck, recount

_CHECKS: tuple[Check, ...] = (
    *figures.CHECKS,
    *counts.CHECKS,
    *times.CHECKS,
    *card.CHECKS,
    *energy.CHECKS,
)
_RAW_CHECKS: tuple[RawCheck, ...] = (
    *figures.RAW_CHECKS,
    *counts.RAW_CHECKS,
    *times.RAW_CHECKS,
    *card.RAW_CHECKS,
)


def contradictions(row: Measurement) -> Iterator[str]:
    """Yield what about a succeeded row cannot be true."""
    for check in _CHECKS:
        reason = check(row)
        if reason is not None:
            yield reason
    raw = recount(row) if row.samples else None
    if raw is None:
        return
    for raw_check in _RAW_CHECKS:
        reason = raw_check(row, raw)
        if reason is not None:
            yield reason
