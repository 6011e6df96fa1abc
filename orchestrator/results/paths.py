"""The names of all files of a run, and where rows go that find no room in it.

<results>/<run>/rows/*.parquet    the rows; open them with pyarrow, pandas, DuckDB or Polars
<results>/<run>/rows/.appended-*  rows of the last seconds, until they are Parquet
                                  (``append_log.py``)
<results>/<run>/quarantine/       rows that were found torn or corrupt, or that came too
                                  late, kept for a look
<results>/<run>/logs/             what worker processes print
<results>/<run>/grid.yaml         the grid file as it was read
<results>/<run>/options.json      options that `nightgrid run --resume` takes over, and the seed
                                  that draws the order of replicates
<results>/<run>/revisions.json    commits that names of the hub in the grid came to at the start; a
                                  run that is resumed keeps them, though a branch has moved
<results>/<run>/passports.parquet how fast each card was when it was first used (``passports.py``)
<results>/<run>/status.json       what the run does now
<results>/<run>/report.html       the report
<results>/<run>/trace-*.json.gz   of each attempt with `profile: true`, two steps for Perfetto
<results>/<run>/stop.json         a request to end the run (``stop_file.py``)
<results>/<run>/fetched.json      of a copy that `nightgrid fetch` made: of which run, from where
<results>/<run>/fetched-logs.txt  of such a copy: names of the logs of rows that were fetched
<results>/<run>/driver.lock       who writes; there is one writer (``lock.py``)
<results>/<run>/begun.log         of each attempt that runs now, what its row is made of should
                                  its driver die (``begun.py``)
<results>/<run>/.reserve          room that is given up for status and report on a full disk
<results>/<run>/run.id            by which a driver's processes and spilled rows are known, and
                                  the directory whose id it is (``identity.py``)
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

ROWS = "rows"
QUARANTINE = "quarantine"
LOGS = "logs"
GRID = "grid.yaml"
OPTIONS = "options.json"
REVISIONS = "revisions.json"
PASSPORTS = "passports.parquet"
STATUS = "status.json"
REPORT = "report.html"
STOP = "stop.json"
FETCHED = "fetched.json"
FETCHED_LOGS = "fetched-logs.txt"
LOCK = "driver.lock"
LOCK_GUARD = ".driver.lock.guard"
BEGUN = "begun.log"
RESERVE = ".reserve"
RUN_ID = "run.id"


_TRACE = re.compile(r"trace-[A-Za-z0-9._-]{1,200}\.json\.gz")


def trace_of(attempt_id: str) -> str:
    """Name of the file with an attempt's trace."""
    return f"trace-{attempt_id}.json.gz"


def is_trace(name: str) -> bool:
    """Tell if a file of this name is a trace."""
    return _TRACE.fullmatch(name) is not None


def spill_directories(run_id: str) -> list[Path]:
    """Directories of this host for rows that found no room in their run's directory."""
    places = (Path(tempfile.gettempdir()), Path.home(), Path("/dev/shm"))
    return [place / f".nightgrid-unsaved-{run_id}" for place in places if place.is_dir()]
