"""Questions about runs on a cluster, answered by helper jobs on its head over the job interface.

The driver of a submitted run and a helper job run on the head node, so the helper finds the run's
files where the driver writes them: where the submission said, else in the home directory there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

from orchestrator.errors import SubmitError
from orchestrator.on_ray.submission import JobInfo, JobServer
from orchestrator.results.directory import is_address

ANSWER_S = 120.0
#: Ray's own lines of a job's log, before what the command prints.
_RAYS = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\tINFO |Running entrypoint for job ")


def ask_there(
    server: JobServer, arguments: Sequence[str], results: str | None, job: JobInfo | None = None
) -> str:
    """The output of a command of this program on the head.

    Args:
        results: the directory there; None: that of ``job``, else where runs go by default there.

    Raises:
        SubmitError: it failed; the message has what it printed.
    """
    there = directory_there(results, job)
    printed = server.ask([*arguments, *(["--results", there] if there else [])], timeout_s=ANSWER_S)
    return "\n".join(line for line in printed.splitlines() if not _RAYS.match(line))


def directory_there(results: str | None, job: JobInfo | None) -> str:
    """The directory of results on the head: the one that is named, else that of the job; empty
    where runs go by default."""
    there = results or (job.results if job is not None else "")
    return "" if is_address(there) else there


def ask_json(
    server: JobServer, arguments: Sequence[str], results: str | None, job: JobInfo | None = None
) -> Any:
    """The JSON document that a command prints there, from a line that begins with it to the end.

    Raises:
        SubmitError: it failed; the message has what it printed.
    """
    printed = ask_there(server, [*arguments, "--json"], results, job)
    lines = printed.splitlines()
    for first, line in enumerate(lines):
        if line.startswith(("{", "[")):
            with contextlib.suppress(ValueError):
                return json.loads("\n".join(lines[first:]))
    refusal = printed.partition(f"nightgrid {arguments[0]}: ")[2] or printed
    raise SubmitError(f"{server.address}: {refusal.strip()[-500:] or 'no answer'}")
