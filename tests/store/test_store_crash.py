"""Other processes write, compact and are killed; readers lose nothing and see nothing twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import store_processes
from measurements import row
from patience import patience
from store_processes import CONTEXT

from orchestrator.store.store import Store


def numbers(store: Store) -> list[int]:
    """The rows that the store shows, by their batch size."""
    return sorted((m.batch_size or 0) - 1 for m in store.measurements(samples=False))


def run_until_killed(number: int, torn: bool, act: Callable, results: Path) -> tuple[bool, bool]:
    """Let a process do ``act`` and die at its ``number``-th system call. Returns whether it was
    killed, and whether it had acknowledged its work before."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(
        target=store_processes.die_at, args=(number, torn, act, results, theirs)
    )
    process.start()
    theirs.close()
    process.join(patience(60))
    try:
        acknowledged = ours.poll() and ours.recv() is not None
    except EOFError:
        acknowledged = False
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0, acknowledged


@pytest.mark.slow
@pytest.mark.parametrize(("torn", "every"), [(False, 3), (True, 1)])
def test_a_writer_killed_between_any_two_system_calls(
    tmp_path: Path, torn: bool, every: int
) -> None:
    """Dying just before a system call of an append, or within a write, leaves no torn row, loses no
    acknowledged one, and the next writer can go on. Simulated nights die at the other calls."""
    number, killed = 1 - every, True
    while killed:
        number += every
        results = tmp_path / str(number)
        with Store.open(results, "night") as store:
            store.append(row(0))
        killed, acknowledged = run_until_killed(number, torn, store_processes.append_one, results)
        seen = numbers(store)
        assert store.read().damaged == (), f"call {number}"
        assert seen in ([0], [0, 100]), f"call {number}"
        assert not acknowledged or seen == [0, 100], f"call {number}"
        with Store.open(results, "night") as store:
            store.append(row(1))
            after = numbers(store)
        assert set(seen) | {1} <= set(after) <= {0, 1, 100}, f"call {number}"
        assert len(after) == len(set(after))
        torn_away = store.read().damaged
        assert len(torn_away) <= 1
        assert not (100 in after and torn_away), f"call {number}"
    assert number > (3 if torn else 10), "the append makes more system calls than were counted"


@pytest.mark.slow
def test_a_compaction_killed_between_any_two_system_calls(tmp_path: Path) -> None:
    """For every third system call of a compaction, dying just before it shows each row exactly
    once, then and after the next writer has compacted; simulated nights die at the others."""
    number, killed = -2, True
    while killed:
        number += 3
        results = tmp_path / str(number)
        with Store.open(results, "night") as store:
            for each in range(3):
                store.append(row(each))
            if number % 2:  # also over an older compacted file
                store.compact()
                store.append(row(3))
                store.append(row(4))
        wanted = numbers(store)
        killed, _ = run_until_killed(number, False, store_processes.compact, results)
        assert numbers(store) == wanted, f"call {number}"
        with Store.open(results, "night") as store:
            store.compact()
            assert numbers(store) == wanted, f"call {number}"
        assert len([n for n in os.listdir(store.tables_path) if n.endswith(".parquet")]) == 1
    assert number > 15


@pytest.mark.slow
def test_reading_while_a_run_writes_and_compacts(tmp_path: Path) -> None:
    """A reader that looks all the time sees rows come and never go, each once, none damaged."""
    count = 60
    process = CONTEXT.Process(target=store_processes.write_and_compact, args=(tmp_path, count, 7))
    process.start()
    store = Store.open(tmp_path, "night")
    looks, before = 0, 0
    while process.is_alive() or before < count:
        contents = store.read(samples=looks % 2 == 0)
        sizes = [m.batch_size for m in contents.measurements]
        assert sizes == list(range(1, len(sizes) + 1))
        assert len(sizes) >= before
        assert contents.damaged == ()
        before, looks = len(sizes), looks + 1
        assert process.exitcode in (None, 0)
    process.join(patience(60))
    assert before == count and looks > 3
