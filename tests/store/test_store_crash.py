"""Drivers that fail or die at any call of the disk lose no row and double none."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measurements import journal_row, row
from store_processes import Killed

from orchestrator.core.errors import StoreError
from orchestrator.store import disk
from orchestrator.store.lock import RunLock
from orchestrator.store.store import Store

#: The calls that may fail.
CALLS = (
    *("create", "create_new", "write", "sync", "rename", "remove"),
    *("sync_directory", "names", "read", "make_directory"),
)
#: By fault: the calls that it may hit. An error may come although the work was done.
FAULTS = {
    "dies before": CALLS,
    "dies after": CALLS,
    "dies within": ("write",),
    "fails before": CALLS,
    "fails after": ("write", "sync", "rename", "sync_directory"),
}


def drive(results: Path, act: Callable[[Store], object], number: int, fault: str) -> bool:
    """Let a driver do ``act`` with a fault at its ``number``-th call that it may hit; return
    whether it made so many."""
    calls, reached, dead = itertools.count(1), False, False

    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal reached, dead
            if dead:
                raise Killed
            if name not in FAULTS[fault] or next(calls) != number:
                return real(*arguments, **options)
            reached, dead = True, fault.startswith("dies")
            if fault.endswith("after"):
                real(*arguments, **options)
            elif fault.endswith("within"):
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
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_call_loses_and_doubles_no_row(tmp_path: Path, fault: str) -> None:
    """While a driver begins attempts, appends their rows, and makes Parquet of them."""
    safe = set[int]()
    for number in itertools.count(1, 3 if FAULTS[fault] == CALLS else 1):
        with Store(tmp_path, "night") as store:
            store.compact()  # else there are more files, and calls, at each death

        def write(store: Store, number: int = number) -> None:
            with contextlib.suppress(StoreError):
                store.begin(journal_row(number))
            for _ in range(2):
                with contextlib.suppress(StoreError):
                    store.append(row(number))
                    safe.add(number)
            with contextlib.suppress(StoreError, OSError):
                store.to_parquet() if number % 2 else store.compact()

        reached = drive(tmp_path, write, number, fault)
        seen = store.measurements(samples=False)
        counts = Counter((one.final, (one.batch_size or 0) - 1) for one in seen)
        assert set(counts.values()) <= {1}, number
        finals = {at for final, at in counts if final}
        assert safe <= finals <= {*range(number + 1)}, number
        assert store.read(samples=False).damaged == (), number
        safe.update(finals)
        if not reached:
            break
    assert number > (30 if FAULTS[fault] == CALLS else 3)
