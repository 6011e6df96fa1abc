"""Comparison of a run's grid with the one that the run was begun with, before anything starts.

To extend a run is legitimate: its rows stay, and jobs that are equal are measured once. A grid of
another name that shares no job with the run is taken for a slip of the pen: two nights would lie in
one directory, and the run would keep the grid of one of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import GridError, NightgridError
from orchestrator.results import paths
from orchestrator.runtime.options import commits_of
from workloads import files

if TYPE_CHECKING:
    from orchestrator.domain.job import Job
    from orchestrator.grid.model import Grid

#: Experiments that are named, of those that changed; the others are counted.
MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GridChange:
    """A grid beside the one that its run kept."""

    name_before: str
    equal: int  # jobs of both
    new: tuple[Job, ...]
    gone: tuple[Job, ...]

    def lines(self) -> Iterator[str]:
        """Say what the run will and will not measure that it would have before."""
        if not self.new and not self.gone:
            return
        yield (
            f"grid changed since this run began: {_jobs(self.equal)} as before, "
            f"{len(self.new)} new, {len(self.gone)} gone"
        )
        yield from _experiments("new", self.new)
        yield from _experiments("gone", self.gone)
        if self.gone:
            yield "  rows of jobs that are gone stay in the run and in its report"


def change_of(grid: Grid, run: Path) -> GridChange | None:
    """Compare a grid with the one that the run in a directory kept; None where these are equal, and
    where there is none or it cannot be read any more."""
    from orchestrator.grid.reader import load_grid

    kept = run / paths.GRID
    with contextlib.suppress(OSError, ValueError, NightgridError):
        if files.read_text(kept) == grid.text:
            return None
        before = load_grid(kept, commits=commits_of(run))  # as --resume reads it
        known = {job.job_id for job in before.jobs()}
        now = {job.job_id for job in grid.jobs()}
        return GridChange(
            name_before=before.name,
            equal=len(known & now),
            new=tuple(job for job in grid.jobs() if job.job_id not in known),
            gone=tuple(job for job in before.jobs() if job.job_id not in now),
        )
    return None


def refuse_another(grid: Grid, change: GridChange, run: str, measured: Collection[str]) -> None:
    """Refuse a grid of another name none of whose jobs the run has asked for or measured.

    Args:
        measured: ids of the jobs that have rows.

    Raises:
        GridError: it is another grid; the message names both and the ways out.
    """
    if not measured or change.equal or change.name_before == grid.name:
        return
    if any(job.job_id in measured for job in grid.jobs()):
        return
    message = (
        f"run {run!r} was made by another grid, {change.name_before!r}, and has none of the "
        f"{_jobs(len(grid.jobs()))} of {grid.name!r}"
    )
    hint = (
        f"give this grid a run of its own (--run with another name); to extend run {run!r}, add "
        f"experiments to its grid, or name this one {change.name_before!r}, too"
    )
    raise GridError([grid.document.problem(("name",), message, hint)])


def _experiments(what: str, jobs: Collection[Job]) -> Iterator[str]:
    counts = Counter(job.experiment for job in jobs)
    named = [f"{_jobs(count)} of {name}" for name, count in counts.most_common(MOST_NAMED)]
    if len(counts) > MOST_NAMED:
        rest = sum(counts.values()) - sum(n for _, n in counts.most_common(MOST_NAMED))
        named.append(f"{_jobs(rest)} of {len(counts) - MOST_NAMED} more experiments")
    if named:
        yield f"  {what}: {', '.join(named)}"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"
