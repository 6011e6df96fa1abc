"""Exit codes of the command line: one table, for scripts, `nightgrid --help` and docs/cli.md.

Codes up to 9 say that something was refused or missing and belong to the classes of ``errors.py``.
From 10 on the command did its work, and the answer is not the wished one.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    7: "an optional package is missing; the message names the extra",
    JOBS_FAILED: "of a run: some job FAILED, TIMED_OUT, was LOST or NOT_STARTED",
    REGRESSION: "of `compare --fail-on-regression`: something got worse",
    CLUSTER_DOUBTFUL: "of `doctor`: it warns, and found no error",
    CLUSTER_UNFIT: "of `doctor`: a run would fail, wholly or on some node",
    DISAGREEMENT: "of `verify`: some engine's numbers are off, or a job gave none",
    INTERRUPTED: "ended at once by an interrupt; the same command goes on",
}


def table() -> str:
    """A line a code, for the end of a help text."""
    return "\n".join(f"  {code:<4} {meaning}" for code, meaning in MEANINGS.items())
