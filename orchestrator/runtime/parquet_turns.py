"""The times at which the rows that are safe become Parquet, which any reader opens.

``RowWriter`` tells of rows that are safe and asks for a turn between two records; a file is made
every few seconds at most, in the thread that writes rows where there is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor as Threads
from concurrent.futures import Future
from dataclasses import dataclass, field

from orchestrator.core.errors import StoreLocked

_LOG = logging.getLogger("nightgrid.store")

PARQUET_INTERVAL_S = 5.0  # between two files for readers that know nothing of our log


@dataclass(slots=True, kw_only=True)
class ParquetTurns:
    """Makes a Parquet file of the rows when it is time, and tells how that went.

    Attributes:
        make: a file of all rows that are safe; it raises an exception if that cannot be now.
        thread: in which it is made; None: in the caller's.
    """

    make: Callable[[], object]
    clock: Callable[[], float]
    thread: Threads | None = None
    _wanted: bool = False  # there are rows that are safe, and not in Parquet
    _next_at: float = 0.0  # when they may become so, at the earliest
    _making: Future[None] | None = None
    _said: set[str] = field(default_factory=set)  # why it failed, since a file was made

    @property
    def making(self) -> bool:
        """Return whether the thread makes a file, or nobody has looked at its end."""
        return self._making is not None

    def rows_came(self) -> None:
        """Rows are safe that are not in Parquet."""
        self._wanted = True

    def ended(self) -> bool:
        """Return whether no file is being made, now that somebody looks."""
        if self._making is not None and not self._making.done():
            return False
        self.wait()
        return True

    def begin(self) -> bool:
        """Make a file if it is time for one; return whether the thread is at it. None may be in the
        making."""
        now = self.clock()
        if not self._wanted or now < self._next_at:
            return False
        self._wanted, self._next_at = False, now + PARQUET_INTERVAL_S
        if self.thread is None:
            self._try()
            return False
        self._making = self.thread.submit(self._try)
        return True

    def make_last(self) -> None:
        """Make a file of what is left."""
        self.wait()
        if self._wanted:
            self._wanted = False
            self._try()

    def wait(self) -> None:
        """Wait for the file that is being made, if any is."""
        making, self._making = self._making, None
        if making is not None:
            making.result()

    def _try(self) -> None:
        """Make a file. A convenience: whoever appends hears of a full disk, so a failure is said
        once, and ends nothing."""
        try:
            self.make()
            self._said.clear()
        except StoreLocked:  # the run is another driver's, and so are its rows
            pass
        except Exception as error:
            self._wanted = True
            cause = _cause_of(error)
            if cause not in self._said:
                self._said.add(cause)
                text = str(error) or repr(error)
                _LOG.warning("rows are safe, but not in Parquet yet: %s", text)


def _cause_of(error: Exception) -> str:
    """The cause of a failure without the names of files: each try has its own."""
    origin = error.__cause__ or error
    if isinstance(origin, OSError) and origin.errno is not None:
        return f"{type(origin).__name__} {origin.errno}"
    return f"{type(error).__name__} {error}"
