"""The part of a run that its page shows: all of an ordinary run, and of a larger one as much.

A page of a hundred thousand rows would take minutes to make, and a phone could not open it. The
figures at its top count all rows; its tables and its list of rows are cut, and the page says what
is left out and where it is. Rows without an answer come first, since they are what one looks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from orchestrator.core.measurement import Measurement
from orchestrator.report.causes import SETTLED
from orchestrator.report.summary import Summary

#: Runs of up to so many jobs are shown whole.
ORDINARY_ROWS = 10_000
#: Limits for a larger run: tables, winners and causes, with the rows of the first tables linked.
MOST_TABLES = 300
MOST_WINNERS = 300
MOST_CAUSES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Numbers of the things that a page does not show."""

    rows: int = 0
    tables: int = 0
    winners: int = 0
    causes: int = 0


def shown_of(summary: Summary) -> tuple[Summary, tuple[Measurement, ...], LeftOut]:
    """The summary as the page prints it, the rows that it lists, and what is left out."""
    if len(summary.rows) <= ORDINARY_ROWS:
        return summary, summary.rows, LeftOut()
    tables = summary.tables[:MOST_TABLES]
    rows = _first(
        (row for row in summary.rows if row.state not in SETTLED),
        (row for table in tables for row in table.cells.values()),
        summary.rows,
    )
    shown = replace(
        summary,
        tables=tables,
        contests=summary.contests[:MOST_WINNERS],
        causes=summary.causes[:MOST_CAUSES],
    )
    left_out = LeftOut(
        rows=len(summary.rows) - len(rows),
        tables=len(summary.tables) - len(tables),
        winners=len(summary.contests) - len(shown.contests),
        causes=len(summary.causes) - len(shown.causes),
    )
    listed = {row.job_id for row in rows}
    return shown, tuple(row for row in summary.rows if row.job_id in listed), left_out


def _first(*groups: Iterable[Measurement]) -> list[Measurement]:
    """The first rows of the groups, each once."""
    chosen: dict[str, Measurement] = {}
    for group in groups:
        for row in group:
            if len(chosen) == ORDINARY_ROWS:
                return list(chosen.values())
            chosen.setdefault(row.job_id, row)
    return list(chosen.values())
