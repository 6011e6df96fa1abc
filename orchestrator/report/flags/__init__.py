"""Flags of rows: succeeded rows whose figure was disturbed, or cannot be true.

A flagged row keeps its state and its numbers. It wins no contest, lies on no front, is no baseline
and takes part in no comparison, and it is listed with the reason. Flags are derived anew whenever
rows are read, those of older versions too; no file is trusted to hold them.

Each file here declares one flag in its ``SPEC``, under the file's name; another installed package
can declare one under the entry points ``nightgrid.flags``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.base import Flag as Flag
from orchestrator.report.flags.base import Raised as Raised
from workloads.declared import Declared

#: Every flag by name.
FLAGS: Declared[Flag] = Declared(__name__, Flag, "nightgrid.flags", separator="_")


@cache
def every_flag() -> tuple[Flag, ...]:
    """All flags, looked up once."""
    return tuple(FLAGS.values())


def raised_on(row: Measurement) -> tuple[Raised, ...]:
    """The flags that apply to a row; none to a row without a figure."""
    if row.state is not State.SUCCEEDED:
        return ()
    return tuple(
        Raised(flag, reason) for flag in every_flag() if (reason := flag.reason(row)) is not None
    )


def raised_by_job(rows: Iterable[Measurement]) -> dict[str, tuple[Raised, ...]]:
    """The flags of each row that has some, by job id."""
    return {row.job_id: raised for row in rows if (raised := raised_on(row))}


def barred(raised: Iterable[Raised]) -> bool:
    """Return whether a row with these flags ranks nowhere."""
    return any(one.flag.league is None for one in raised)


def ranked(
    rows: Sequence[Measurement], raised: Mapping[str, tuple[Raised, ...]]
) -> tuple[Measurement, ...]:
    """The rows that may be ranked, if only within a league, and those without a figure."""
    return tuple(row for row in rows if not barred(raised.get(row.job_id, ())))


def league_of(row: Measurement, raised: Iterable[Raised]) -> str:
    """The league of a row: "" for most; a row is ranked among those of its own alone."""
    leagues = (one.flag.league(row) for one in raised if one.flag.league is not None)
    return ", ".join(dict.fromkeys(leagues))
