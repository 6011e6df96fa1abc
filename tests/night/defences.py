"""What protects a night, one by one, and how each is taken away for the tests.

Taking one away puts another part in its place; the programme itself knows nothing of it. Then some
night must break, and the seed says which: a check that nothing can fail would prove nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from disk_model import SimulatedDisk
from nights import Lock, Night, Promises, run_night

from orchestrator.driver import Driver
from orchestrator.errors import StoreFull
from orchestrator.events import Event, RecordRow, StopWorker
from orchestrator.held import Row
from orchestrator.results import disk, fragments
from orchestrator.scheduling import cards
from orchestrator.scheduling.assignment import Assigner
from orchestrator.scheduling.invariants import InvariantViolated
from orchestrator.scheduling.leases import Leases
from orchestrator.scheduling.pool import Pool
from orchestrator.scheduling.record import JobRecord
from orchestrator.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Defence:
    """One part that protects, what happens without it, and in which nights that shows."""

    name: str
    without: str  # in the words of the violation, or part of them
    take_away: Callable[[], contextlib.AbstractContextManager[Any]]
    on_disk: bool = False
    seeds: int = 60  # tried at most


# ---------------------------------------------------------------- the parts put in place


def _nothing(*_: Any, **__: Any) -> None:
    """Do not."""


def _forget_full_rows() -> contextlib.AbstractContextManager[Any]:
    """A row that finds no room is dropped."""

    def dropping(driver: Driver, rows: Sequence[Row]) -> None:
        with contextlib.suppress(StoreFull):
            driver.store.append(*(measurement for _, measurement in rows))

    return patch.object(Driver, "_append", dropping)


def _start_while_full() -> contextlib.AbstractContextManager[Any]:
    def at_once(driver: Driver, held: Any, command: Any) -> list[Event]:
        if isinstance(command, StopWorker) or hasattr(command, "worker_id"):
            return driver._perform(command)
        held.commands.append(command)
        return []

    return patch.object(Driver, "_hold", at_once)


def _count_late_rows() -> contextlib.AbstractContextManager[Any]:
    """What an attempt brings after it was given up counts as any result."""

    def counted(schedule: Schedule, outcome: Any) -> None:
        attempt = schedule._issued.get(outcome.attempt_id)
        if attempt is not None:
            record = schedule._records[attempt.job_id]
            schedule._commands.append(
                RecordRow(
                    job=record.job,
                    state=outcome.state,
                    reason="measured",
                    final=True,
                    attempt=attempt,
                    outcome=outcome,
                )
            )

    return patch.object(Schedule, "_record_late", counted)


def _any_set() -> contextlib.AbstractContextManager[Any]:
    """Cards side by side, aligned or not."""

    def any_set(_: Any, count: int, server_cards: int) -> tuple[tuple[int, ...], ...]:
        starts = range(server_cards - count, -1, -1)
        return tuple(tuple(range(start, start + count)) for start in starts)

    return patch.object(cards, "legal_groups", any_set)


def _reuse_workers() -> contextlib.AbstractContextManager[Any]:
    """Any idle worker serves a job that asked for a process of its own."""
    return patch.object(
        Leases,
        "_serves_as_it_is",
        lambda _, worker, record: record.width == 1 and worker.state.value == "idle",
    )


def _free_at_once() -> contextlib.AbstractContextManager[Any]:
    """A card counts as free when its worker was told to go, not when it has gone."""
    stop = Leases.stop

    def at_once(leases: Leases, worker: Any, reason: str) -> None:
        stop(leases, worker, reason)
        leases.gone(worker, 0.0)

    return patch.object(Leases, "stop", at_once)


def _half_writes() -> contextlib.AbstractContextManager[Any]:
    """What a write did not take is not written again."""

    def once(path: Path, data: bytes, *, synced: bool) -> None:
        handle = disk.create(path)
        with contextlib.suppress(OSError):
            disk.write(handle, data)
        disk.sync(handle)
        disk.close(handle)

    return patch.object(fragments, "_write", once)


def _of(owner: Any, name: str, new: Any = _nothing) -> Callable[[], Any]:
    return lambda: patch.object(owner, name, new)


DEFENCES = (
    Defence(
        name="the run's lock",
        without="two drivers hold the run at once",
        take_away=_of(Lock, "acquire", lambda self: setattr(self.night, "holder", self.driver)),
    ),
    Defence(
        name="a look at the lock before each write",
        without="two rows",
        take_away=_of(Lock, "still_mine"),
    ),
    Defence(
        name="the end of what a dead driver left running",
        without="has a process of driver",
        take_away=_of(Night, "end_leftovers"),
    ),
    Defence(
        name="a note of each attempt that runs",
        without="is used twice",
        take_away=_of(Promises, "begin"),
    ),
    Defence(
        name="numbers of attempts that go on from earlier drivers'",
        without="is used twice",
        take_away=_of(Night, "attempts_before", lambda *_: {}),
    ),
    Defence(
        name="rows before the driver waits",
        without="the driver waits and rows are not safe",
        take_away=_of(Driver, "_write_rows"),
    ),
    Defence(
        name="rows kept while the disk is full",
        without="rows wait for room",
        take_away=_forget_full_rows,
    ),
    Defence(
        name="nothing started while rows wait for room",
        without="while rows wait for room",
        take_away=_start_while_full,
    ),
    Defence(
        name="fencing by attempt id",
        without="final row",
        take_away=_count_late_rows,
    ),
    Defence(
        name="a card is free when its process is gone",
        without="the card has a worker already",
        take_away=_free_at_once,
    ),
    Defence(
        name="legal sets of cards only",
        without="illegal card set",
        take_away=_any_set,
    ),
    Defence(
        name="fresh processes where they are asked for",
        without="is not fresh",
        take_away=_reuse_workers,
    ),
    Defence(
        name="cards drained for gangs",
        without="starves: ",
        take_away=_of(Assigner, "_reserve"),
    ),
    Defence(
        name="quarantine of cards",
        without="on which no worker comes up, is tried",
        take_away=_of(Pool, "strike"),
    ),
    Defence(
        name="another card for the next attempt",
        without="runs where the last attempt failed",
        take_away=_of(JobRecord, "send_elsewhere"),
    ),
    Defence(
        name="an end to jobs for which no cards are left",
        without="no end after",
        take_away=_of(Pool, "newly_hopeless", lambda *_: []),
    ),
    Defence(
        name="sync of a file before it gets its name",
        without="is lost",
        take_away=_of(SimulatedDisk, "sync"),
        on_disk=True,
    ),
    Defence(
        name="sync of the directory after it",
        without="is lost",
        take_away=_of(SimulatedDisk, "sync_directory"),
        on_disk=True,
    ),
    Defence(
        name="a write until all is written",
        without="is lost",
        take_away=_half_writes,
        on_disk=True,
    ),
    Defence(
        name="checksums of rows",
        without="",
        take_away=_of(fragments, "damage_of", lambda *_: None),
        on_disk=True,
    ),
)


def caught_by(defence: Defence) -> tuple[int, str] | None:
    """The first seed whose night breaks without the defence, and how; None if none does."""
    for seed in range(defence.seeds):
        with defence.take_away():
            try:
                run_night(seed, on_disk=defence.on_disk)
            except InvariantViolated as violation:
                text = str(violation).partition("\n")[0]
                if defence.without in text:
                    return seed, text
    return None
