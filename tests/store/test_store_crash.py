"""Drivers that fail or die at any call of the disk lose no row and double none."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import CALLS, Drivers, Killed
from measurements import numbers, row

from orchestrator.store import disk
from orchestrator.store.lock import RunLock
from orchestrator.store.store import Store


def dies(results: Path, act: Callable[[Store], object], number: int, *, torn: bool) -> bool:
    """Let a driver do ``act`` and die before its ``number``-th call of the disk, or, ``torn``, in
    the middle of its ``number``-th write; return whether it died."""
    calls, dead = itertools.count(1), False

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal dead
            if not dead and (not torn or name == "write") and next(calls) == number:
                dead = True
                if torn:
                    handle, data = arguments
                    real(handle, data[: len(data) // 2])
            if dead:
                raise Killed
            return real(*arguments, **options)

        return call

    lock = RunLock(results / "night")
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(disk, name, dying(name, getattr(disk, name)))
        with contextlib.suppress(Killed), Store(results, "night", lock=lock) as store:
            act(store)
    lock.release()  # as the kernel does it
    return dead


@pytest.mark.slow
@pytest.mark.parametrize(("torn", "every"), [(False, 3), (True, 1)], ids=["between", "torn"])
def test_a_writer_that_dies_at_any_call(tmp_path: Path, torn: bool, every: int) -> None:
    """While it appends or compacts; simulated nights die at the other calls."""
    safe = set[int]()
    for number in itertools.count(1, every):
        with Store.open(tmp_path, "night") as store:
            store.compact()  # else there are more files, and calls, at each death

        def write(store: Store, number: int = number) -> None:
            store.append(row(number))
            safe.add(number)
            store.compact()

        died = dies(tmp_path, write, number, torn=torn)
        seen = numbers(store)
        assert safe <= {*seen} <= {*range(number + 1)} and len({*seen}) == len(seen), number
        assert store.read(samples=False).damaged == (), number
        safe.update(seen)
        if not died:
            break
    assert number > (3 if torn else 30)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_are_safe_stay_safe_and_single(tmp_path, monkeypatch, seed) -> None:
    drivers = Drivers(tmp_path, seed, monkeypatch)
    for _ in range(6):  # of which most die or give up
        drivers.drive()
    drivers.check()
