"""Acts of other processes on a store in the tests: write, compact, and die at a chosen moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measurements import row

from orchestrator.core.errors import StoreLocked
from orchestrator.store import disk
from orchestrator.store.lock import Holder
from orchestrator.store.store import Store

CONTEXT = multiprocessing.get_context("forkserver")
# Children that import nothing start in milliseconds, so many can be killed. Arrow looks for pandas
# at the first row.
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "pandas",
        "pyarrow.parquet",
        "orchestrator.store.schema",
        "orchestrator.store.store",
    ]
)

#: The system calls that change what is on the disk, as the store makes them.
CALLS = ("open", "write", "fsync", "close", "rename", "unlink", "link", "replace")
#: Names that ``store/disk.py`` gives to some of them.
OF_THE_STORE = {
    "write": "write",
    "sync": "fsync",
    "close": "close",
    "rename": "rename",
    "remove": "unlink",
}


def write_and_compact(results: Path, count: int, every: int) -> None:
    """Append ``count`` rows and compact now and then."""
    with Store.open(results, "night") as store:
        for number in range(count):
            store.append(row(number))
            if (number + 1) % every == 0:
                store.compact()


def log_rows(results: Path, count: int, every: int) -> None:
    """Append ``count`` rows and make Parquet of them now and then."""
    with Store.open(results, "night") as store:
        for number in range(count):
            store.append(row(number))
            if (number + 1) % every == 0:
                store.to_parquet()
                time.sleep(0.05)


def append_one(results: Path, acknowledged: Connection) -> None:
    """Append row 100."""
    with Store.open(results, "night") as store:
        store.append(row(100))
        acknowledged.send(100)


def compact(results: Path, acknowledged: Connection) -> None:
    """Compact what is there."""
    with Store.open(results, "night") as store:
        store.compact()
        acknowledged.send(0)


def die_at(
    number: int,
    torn: bool,
    act: Callable[[Path, Connection], None],
    results: Path,
    acknowledged: Connection,
) -> None:
    """Do ``act``, but be killed just before the ``number``-th system call; ``torn``: after half of
    the bytes of the ``number``-th write. Ends with exit code 0 when there were fewer calls."""
    made = 0

    def guard(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **named: Any) -> Any:
            nonlocal made
            made += not torn or name == "write"
            if made == number and (not torn or name == "write"):
                if torn:
                    handle, data = arguments
                    call(handle, bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return guarded

    for name in CALLS:
        setattr(os, name, guard(name, getattr(os, name)))
    for name, of_os in OF_THE_STORE.items():
        setattr(disk, name, getattr(os, of_os))
    act(results, acknowledged)
    acknowledged.close()
    os._exit(0)


def hold(results: Path, told: Connection) -> None:
    """Take the run and keep it until killed."""
    with Store.open(results, "night"):
        told.send("held")
        time.sleep(3600)


def try_to_hold(results: Path, start_at: float, told: Connection) -> None:
    """Take the run at a given time, together with rivals; say how it went, keep it a while.

    Between finding a dead holder and acting on it, each dawdles, so that rivals get in between.
    """
    judge = Holder.alive

    def dawdle(holder: Holder, here: Holder, lock: Path) -> bool | None:
        verdict = judge(holder, here, lock)
        time.sleep(0.1)
        return verdict

    Holder.alive = dawdle  # type: ignore[method-assign]
    time.sleep(max(0.0, start_at - time.time()))
    try:
        with Store.open(results, "night"):
            told.send("held")
            told.recv()
    except StoreLocked as error:
        told.send(str(error))
