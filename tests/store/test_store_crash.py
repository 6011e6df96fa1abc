"""Drivers that fail or die at any call of the disk lose no row and double none."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import CALLS, Drivers, Killed
from measurements import numbers, row

from orchestrator.core.errors import StoreError
from orchestrator.store import disk
from orchestrator.store.lock import RunLock
from orchestrator.store.store import Store


def drive(results: Path, act: Callable[[Store], object], number: int, fault: str) -> bool:
    """Let a driver do ``act`` with a fault at its ``number``-th call of the disk; return whether it
    made so many. It dies there, dies in the middle of that write (``torn``), or goes on after an
    error (``fails``)."""
    calls, reached, dead = itertools.count(1), False, False

    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal reached, dead
            if dead:
                raise Killed
            counts = fault != "torn" or name == "write"
            if not counts or next(calls) != number:
                return real(*arguments, **options)
            reached, dead = True, fault != "fails"
            if fault == "torn":
                handle, data = arguments
                real(handle, data[: len(data) // 2])
            raise Killed if dead else OSError(errno.ESTALE, "Stale file handle")

        return call

    lock = RunLock(results / "night")
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(disk, name, faulty(name, getattr(disk, name)))
        with contextlib.suppress(Killed, StoreError), Store(results, "night", lock=lock) as store:
            act(store)
    lock.release()  # as the kernel does it
    return reached


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "every"), [("dies", 3), ("torn", 1), ("fails", 3)])
def test_a_fault_at_any_call_loses_and_doubles_no_row(tmp_path, fault, every) -> None:
    """While a driver appends or compacts; simulated nights have faults at the other calls."""
    safe = set[int]()
    for number in itertools.count(1, every):
        with Store(tmp_path, "night") as store:
            store.compact()  # else there are more files, and calls, at each death

        def write(store: Store, number: int = number) -> None:
            for _ in range(2):
                with contextlib.suppress(StoreError):
                    store.append(row(number))
                    safe.add(number)
            with contextlib.suppress(StoreError, OSError):
                store.compact()

        reached = drive(tmp_path, write, number, fault)
        seen = numbers(store)
        assert safe <= {*seen} <= {*range(number + 1)} and len({*seen}) == len(seen), number
        assert store.read(samples=False).damaged == (), number
        safe.update(seen)
        if not reached:
            break
    assert number > (3 if fault == "torn" else 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_rows_that_are_safe_stay_safe_and_single(tmp_path, monkeypatch, seed) -> None:
    drivers = Drivers(tmp_path, seed, monkeypatch)
    for _ in range(6):  # of which most die or give up
        drivers.drive()
    drivers.check()
