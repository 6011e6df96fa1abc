"""``stop.json``: a request to end a run, left for its driver in the run's directory.

Whoever sees the directory can ask, on whatever host the driver is, and the driver looks every
second. The first request lets running jobs end, a second stops them too. A request is for the
driver that is there and for those that its supervisor starts after it; one that somebody starts
later removes it.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
from pathlib import Path

from orchestrator.results import paths
from orchestrator.results.store import Store
from workloads.util import files

MOST = 2


def request_stop(store: Store, *, at_once: bool = False) -> int:
    """Ask the driver of a run to end it; how often it was asked by now.

    Raises:
        StoreError: the request cannot be written.
    """
    before, _ = requested(store.path)
    count = MOST if at_once else min(MOST, before + 1)
    by = f"{_user()} on {socket.gethostname()}"
    store.write_file(paths.STOP, json.dumps({"requests": count, "by": by}))
    return count


def requested(run: Path) -> tuple[int, str]:
    """The number of requests that lie in a run's directory, and who made them."""
    try:
        values = json.loads(files.read_text(run / paths.STOP))
        count, by = values["requests"], str(values["by"])[:200]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0, ""
    return (max(0, min(MOST, count)), by) if type(count) is int else (0, "")


def forget_requests(run: Path) -> None:
    """Remove the requests from a run's directory."""
    with contextlib.suppress(OSError):
        os.unlink(run / paths.STOP)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        return f"user {os.getuid()}"
