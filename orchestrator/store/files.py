"""Names of a run's files, which lie in RESULTS/RUN, and the location of results.

The default is ``./results``, or in a Ray job, whose working directory Ray deletes, the home
directory of the driver's node. ``NIGHTGRID_RESULTS`` overrides it; the address of an object store
there names only a copy (``remote.py``).
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
from pathlib import Path

from orchestrator.core.errors import StoreError, StoreFull
from orchestrator.store import disk
from orchestrator.util.host import variable_in
from workloads.util import files

ROWS = "rows"  # *.parquet, and .rows-* of the last seconds until they are Parquet (``log.py``)
QUARANTINE = "quarantine"  # what was found damaged, kept for a look
LOGS = "logs"  # what worker processes print
REQUESTS = "requests"  # *.arrow: of each attempt of `workload: serving`, all requests of its load
GRID = "grid.yaml"  # the grid file as it was read
OPTIONS = "options.json"  # what `nightgrid run --resume` restores, with the order of replicates
REVISIONS = "revisions.json"  # hub commits of the grid's names at the start, kept on resume
CARD_CHECKS = "passports.parquet"  # how fast each card was (``history.py``)
PREDICTIONS = "predictions.parquet"  # figures of cells that were not measured (``history.py``)
STATUS = "status.json"  # what the run does now
REPORT = "report.html"
STOP = "stop.json"  # a request to end the run
FETCHED = "fetched.json"  # of a copy that `nightgrid fetch` made: of which run, from where
LOCK = "driver.lock"  # who writes; there is one writer (``lock.py``)
LOCK_GUARD = ".driver.lock.guard"
JOURNAL = "begun.log"  # attempt journal: rows of attempts if the driver dies (``log.py``)
RESERVE = ".reserve"  # room that is given up for status and report on a full disk
RUN_ID = "run.id"  # marks a driver's processes (``identity.py``)


def answer_file(number: int) -> str:
    """Name of the grid of the one job that answers a question, from 1."""
    return f"answer-{number}.yaml"


_TRACE = re.compile(r"trace-[A-Za-z0-9._-]{1,200}\.json\.gz")


def trace_of(attempt_id: str) -> str:
    """Name of the file with two steps of an attempt with `profile: true`, for Perfetto."""
    return f"trace-{attempt_id}.json.gz"


def requests_of(attempt_id: str) -> str:
    """Path in the run of the table of an attempt's requests (Arrow IPC)."""
    return f"{REQUESTS}/{attempt_id}.arrow"


def is_trace(name: str) -> bool:
    """Return whether this is the name of a trace."""
    return _TRACE.fullmatch(name) is not None


# ---------------------------------------------------------------- where runs lie

VARIABLE = "NIGHTGRID_RESULTS"
#: Ray sets this for the entrypoint of a job and for nothing else.
RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: Prefixes of object store addresses.
SCHEMES = ("s3://", "gs://", "gcs://")
_RAY_WORKING_DIRS = "runtime_resources/working_dir_files"


def default_results_dir() -> Path:
    """The results directory for this process in its working directory.

    Raises StoreError if the environment names one of an unknown user, or with a variable.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen and not is_address(chosen):
        try:
            return directory_of(chosen)
        except ValueError as error:
            raise StoreError(f"{VARIABLE}={error}") from None
    return Path.home() / "nightgrid-results" if inside_ray_job() else Path("results")


def directory_of(text: str) -> Path:
    """Expand ``~``, which no shell does in a Ray job; ValueError for an unknown user's home, or
    a variable, which would become a directory of that name."""
    if (variable := variable_in(text)) and not os.path.exists(text):
        raise ValueError(f"{text}: {variable} is not replaced here; write its value")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise ValueError(f"{text}: this machine has no home directory {user}") from None


def is_address(text: str) -> bool:
    """Return whether this names an object store, and no directory."""
    return text.startswith(SCHEMES)


def default_address() -> str:
    """The address for a copy of results that the environment names; empty without one."""
    chosen = os.environ.get(VARIABLE, "")
    return chosen if is_address(chosen) else ""


def inside_ray_job() -> bool:
    """Return whether this process runs in a Ray job, with a temporary working directory."""
    return RAY_JOB_VARIABLE in os.environ or _RAY_WORKING_DIRS in Path.cwd().as_posix()


# ---------------------------------------------------------------- side files

_RESERVE_BYTES = 64 * 2**10


def write_side_file(run: Path, name: str, content: str | bytes) -> Path:
    """Replace a side file, or one of the folder ``REQUESTS``, atomically, using the reserve on a
    full disk; may raise StoreError."""
    folder, _, last = name.rpartition("/")
    if folder not in ("", REQUESTS):
        raise StoreError(f"{name!r} is not a file of a run")
    disk.valid_name(last, "file name")
    data = content.encode() if isinstance(content, str) else content
    directory = run / folder
    disk.make_directory(directory)
    try:
        return disk.replace_file(directory, last, data)
    except StoreFull:
        remove_reserve(run)
        return disk.replace_file(directory, last, data)


def make_reserve(run: Path) -> None:
    """Reserve space, so that ``status.json`` can report a full disk; StoreFull or StoreError."""
    if not disk.is_there(run / RESERVE):
        disk.replace_file(run, RESERVE, bytes(_RESERVE_BYTES))


def remove_reserve(run: Path) -> None:
    """Give the space back."""
    with contextlib.suppress(OSError):
        disk.remove(run / RESERVE)


# ---------------------------------------------------------------- whose a run is

#: Names the submitter in a Ray job, whose user is the cluster's; people may set it, too.
SUBMITTER_VARIABLE = "NIGHTGRID_SUBMITTER"


def submitter() -> str:
    """``user@host`` of the person whom this process works for."""
    if chosen := os.environ.get(SUBMITTER_VARIABLE):
        return chosen[:200]
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


# ---------------------------------------------------------------- requests to stop

#: The first request lets running jobs end, the second stops them too.
MOST_STOP_REQUESTS = 2


def request_stop(run: Path, *, at_once: bool = False) -> int:
    """Ask a run's driver to stop; return the number of requests. May raise StoreError."""
    before, _ = stop_requests(run)
    count = MOST_STOP_REQUESTS if at_once else min(MOST_STOP_REQUESTS, before + 1)
    by = " on ".join(submitter().rsplit("@", 1))
    write_side_file(run, STOP, json.dumps({"requests": count, "by": by}))
    return count


def stop_requests(run: Path) -> tuple[int, str]:
    """Number and author of stop requests, for the driver and its supervisor's restarts of it.

    A driver that is started later by hand removes them.
    """
    try:
        values = json.loads(files.read_text(run / STOP))
        count, by = values["requests"], str(values["by"])[:200]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0, ""
    return (max(0, min(MOST_STOP_REQUESTS, count)), by) if type(count) is int else (0, "")


def remove_stop_requests(run: Path) -> None:
    """Remove the requests from a run's directory."""
    with contextlib.suppress(OSError):
        os.unlink(run / STOP)


#: Side files that are copied with a run. Status last: the rows that it counts precede it.
TRAVELLING = (GRID, OPTIONS, CARD_CHECKS, PREDICTIONS, REPORT, STATUS)
_ANSWER = re.compile(r"answer-[0-9]{1,4}\.yaml")


def travels(name: str) -> bool:
    """Return whether a side file of this name is copied with a run."""
    return name in TRAVELLING or is_trace(name) or _ANSWER.fullmatch(name) is not None
