"""The exceptions that Nightgrid raises on purpose, and the exit codes of the command line.

    NightgridError
    ├── GridError          the grid file is wrong; carries every Problem found
    ├── OptionError        an option is wrong by itself, or beside another
    ├── ClusterError       the cluster cannot be started, joined or used as asked
    │   └── ControlStoreLost  it was, and its control store is gone; a new driver may join later
    ├── StoreError         results cannot be read or written
    │   ├── StoreLocked    another driver holds the run
    │   ├── StoreFull      no space is left for results; nothing was lost
    │   └── SchemaMismatch rows of a schema version this program cannot read
    ├── SubmitError        a Ray job could not be submitted or found
    ├── QueryError         a query over results is refused
    ├── NotComparable      two runs have no rows that may be compared
    └── ExtraMissing       an optional package is not installed

Failures *inside* a job are rows, not exceptions: see ``outcome.py``. ``exit_code`` is that of the
command line. Codes up to 9 belong to these classes; from 10 on the command did its work, and the
answer is negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class NightgridError(Exception):
    """Base of all errors whose message is meant for the user as it stands."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong in an input file: where it is, what it is, what would be right."""

    file: str
    message: str  # what is wrong, with the value
    line: int | None = None  # from 1; None: it is about the file as a whole
    column: int | None = None  # from 1
    path: str = ""  # e.g. "experiments[0].axes.precision"
    hint: str = ""  # what would be right
    steps: tuple[str | int, ...] = ()  # the path's keys and places; none where it has no path

    def __str__(self) -> str:
        where = self.file
        if self.line is not None:
            where += f":{self.line}:{self.column}"
        at = f" {self.path}:" if self.path else ""
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{where}:{at} {self.message}{hint}"


class GridError(NightgridError):
    """A grid file is refused. ``problems`` holds all that was found, in file order."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(
            "\n".join([*map(str, problems), f"{len(problems)} {noun}; nothing was started."])
        )


class OptionError(NightgridError):
    """An option of the command line is wrong by itself, or does not go with another."""

    exit_code = 2


class ClusterError(NightgridError):
    """The cluster cannot be started, joined or used as asked."""

    exit_code = 3


class ControlStoreLost(ClusterError):
    """A cluster's control store does not answer any more, and its nodes are lost."""


class StoreError(NightgridError):
    """Results cannot be read or written."""

    exit_code = 4


class StoreLocked(StoreError):
    """Another driver holds the run."""


class StoreFull(StoreError):
    """No space is left for results. What was written stays; writing again later may succeed."""


class SchemaMismatch(StoreError):
    """Rows were written by a schema version that this program cannot read."""


class SubmitError(NightgridError):
    """A Ray job could not be submitted, found or followed."""

    exit_code = 5


class QueryError(NightgridError):
    """A query over results is refused, by the database or by its rules."""

    exit_code = 2


class NotComparable(NightgridError):
    """Two runs have no rows that may be compared; the message names the keys that differ."""

    exit_code = 6


class ExtraMissing(NightgridError):
    """An optional package is needed and not installed; the message says how to get it."""

    exit_code = 7

    def __init__(self, package: str, *, wanted_for: str) -> None:
        self.package = package
        super().__init__(
            f"{wanted_for} need {package}, which is not installed. "
            f"Get it with:  pip install {package}"
        )


OK = 0
JOBS_FAILED = 10
REGRESSION = 11
CLUSTER_DOUBTFUL = 12
CLUSTER_UNFIT = 13
DISAGREEMENT = 14
INTERRUPTED = 130

MEANINGS: Mapping[int, str] = {
    OK: "done; of a run: every job has an answer",
    1: "a model, a dataset or a file is wrong; `logs --follow`: the job did not succeed",
    2: "the command line, the grid file or the query is refused; nothing was started",
    3: "there is no usable cluster, or it lacks what is asked for",
    4: "results cannot be read, or they or the output not written; or another driver has the run",
    5: "a submitted job cannot be sent, found or followed",
    6: "two runs have no rows that may be compared",
    7: "an optional package is missing; the message names it",
    JOBS_FAILED: "of a run: some job FAILED, TIMED_OUT, was LOST or NOT_STARTED; or none succeeded",
    REGRESSION: "of `compare --fail-on-regression`: something got worse",
    CLUSTER_DOUBTFUL: "of `doctor`: it warns, and found no error",
    CLUSTER_UNFIT: "of `doctor`: a run would fail, wholly or on some node",
    DISAGREEMENT: "of `verify`: some engine's numbers are off, or a job gave none",
    INTERRUPTED: "ended at once by an interrupt; the same command goes on",
}


def table() -> str:
    """A line a code, for the end of a help text."""
    return "\n".join(f"  {code:<4} {meaning}" for code, meaning in MEANINGS.items())
