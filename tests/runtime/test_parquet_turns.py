"""Turns at making Parquet: how often, and what is said of those that fail."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
from driver_cases import FakeClock

from orchestrator.core.errors import StoreError, StoreLocked
from orchestrator.results.fragments import write_error
from orchestrator.runtime.parquet_turns import PARQUET_INTERVAL_S, ParquetTurns


class Files:
    """Files of rows, the making of which fails as it is told."""

    def __init__(self, *troubles: Exception | None) -> None:
        self._troubles = list(troubles)
        self.made = 0

    def make(self) -> None:
        """Make one."""
        if self._troubles and (trouble := self._troubles.pop(0)) is not None:
            raise trouble
        self.made += 1


def full(number: int) -> StoreError:
    """The error for a file of this number that found no room, as the store raises it."""
    origin = OSError(errno.ENOSPC, "no space left")
    error = write_error(Path(f"rows-{number}.parquet"), origin)
    error.__cause__ = origin
    return error


def said_in(files: Files, turns: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of so many turns."""
    caplog.set_level(logging.WARNING, logger="nightgrid.store")
    clock = FakeClock()
    made = ParquetTurns(make=files.make, clock=clock)
    made.rows_came()
    for _ in range(turns):
        made.begin()
        clock.sleep(PARQUET_INTERVAL_S)
    return [record.getMessage() for record in caplog.records]


def test_a_cause_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Though each file has another name."""
    (said,) = said_in(Files(*map(full, range(4))), 5, caplog)
    assert "rows-0.parquet: no space left" in said


def test_each_cause_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Also when the first comes back, which is no news."""
    gone = StoreError("not the writer")
    assert len(said_in(Files(full(0), gone, full(1), gone, MemoryError()), 5, caplog)) == 3


def test_a_cause_that_comes_back_after_a_file_is_said_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Something was done about it, and it was not enough."""
    files = Files(full(0), None, full(1))
    clock = FakeClock()
    turns = ParquetTurns(make=files.make, clock=clock)
    caplog.set_level(logging.WARNING, logger="nightgrid.store")
    for _ in range(3):
        turns.rows_came()
        turns.begin()
        clock.sleep(PARQUET_INTERVAL_S)
    assert files.made == 1 and len(caplog.records) == 2


def test_rows_that_no_file_could_be_made_of_have_one_at_the_end() -> None:
    """And none is made of nothing."""
    files, clock = Files(full(0)), FakeClock()
    turns = ParquetTurns(make=files.make, clock=clock)
    turns.begin()
    turns.rows_came()
    turns.begin()
    assert files.made == 0
    turns.make_last()
    turns.make_last()
    assert files.made == 1


def test_rows_of_a_run_that_another_driver_has_are_left_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a word: whoever appends hears of it."""
    files = Files(StoreLocked("taken over"))
    turns = ParquetTurns(make=files.make, clock=FakeClock())
    caplog.set_level(logging.WARNING, logger="nightgrid.store")
    turns.rows_came()
    turns.make_last()
    turns.make_last()
    assert files.made == 0 and caplog.records == []
