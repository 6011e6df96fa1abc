"""Acts of other processes on a store in the tests: write, hold the run, compete for it."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

from measurements import row

from orchestrator.core.errors import StoreLocked
from orchestrator.store.lock import Holder
from orchestrator.store.store import Store

CONTEXT = multiprocessing.get_context("forkserver")
# Children that import nothing start in milliseconds. Arrow looks for pandas at the first row.
CONTEXT.set_forkserver_preload(["pytest", "pandas", "pyarrow.parquet", "measurements"])


class Killed(BaseException):
    """A driver is dead: nothing of it may catch this."""


def log_rows(results: Path, count: int, every: int) -> None:
    """Append ``count`` rows and make Parquet of them now and then."""
    with Store(results, "night") as store:
        for number in range(count):
            store.append(row(number))
            if (number + 1) % every == 0:
                store.to_parquet()
                time.sleep(0.05)


def hold(results: Path, holding: Connection) -> None:
    """Take the run and keep it until killed."""
    with Store(results, "night"):
        holding.send("held")
        time.sleep(3600)


def try_to_hold(results: Path, start_at: float, result: Connection) -> None:
    """Take the run at a given time, together with rivals; say how it went, keep it a while.

    Each waits between finding a dead holder and acting on it, so that rivals get in between.
    """
    judge = Holder.alive

    def slow(holder: Holder, here: Holder, lock: Path) -> bool | None:
        verdict = judge(holder, here, lock)
        time.sleep(0.1)
        return verdict

    Holder.alive = slow  # type: ignore[method-assign]
    time.sleep(max(0.0, start_at - time.time()))
    try:
        with Store(results, "night"):
            result.send("held")
            result.recv()
    except StoreLocked as error:
        result.send(str(error))
