"""The defences of a night, and a way to take each away for the tests.

Taking one away puts another part in its place; the programme itself knows nothing of it. Then some
night must break, and the seed says which: a check that nothing can fail would prove nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from disk_model import SimulatedDisk
from lossy_exchange import run_exchange
from nights import Night, run_night
from stores import Lock, Promises

from orchestrator.core.errors import StoreFull
from orchestrator.core.events import (
    ClockSet,
    Command,
    Event,
    RecordRow,
    StopWorker,
    Tick,
    WorkerOverdue,
    WorkerStopped,
)
from orchestrator.driver import loop as driver_module
from orchestrator.driver.board import Board
from orchestrator.driver.rows import DelayedCommands, Patience, RowWriter
from orchestrator.on_ray import channel
from orchestrator.scheduler import outcomes, retry, state
from orchestrator.scheduler import scheduler as schedule_module
from orchestrator.scheduler.invariants import InvariantViolated
from orchestrator.scheduler.leases import Leases
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.outcomes import RunEnding
from orchestrator.scheduler.placement import Placement
from orchestrator.scheduler.pool import Pool
from orchestrator.scheduler.queues import Dependencies
from orchestrator.scheduler.retry import Breaker
from orchestrator.scheduler.scheduler import Schedule
from orchestrator.scheduler.state import JobState
from orchestrator.store import disk, log, reader
from orchestrator.store import store as store_module
from orchestrator.store.store import Store
from orchestrator.worker import protocol


@dataclass(frozen=True, slots=True)
class Defence:
    """One part that protects, what happens without it, and in which nights that shows."""

    name: str
    without: str  # in the words of the violation, or part of them
    take_away: Callable[[], contextlib.AbstractContextManager[Any]]
    on_disk: bool = False
    of_channel: bool = False  # protects requests, not nights
    first: int = 0  # seed; most nights do without the rarer ones
    seeds: int = 100  # tried at most

    def is_needed(self) -> bool:
        """Return whether some night breaks without it, in the words of ``without``."""
        for seed in range(self.first, self.first + self.seeds):
            with self.take_away():
                try:
                    if self.of_channel:
                        run_exchange(seed)
                    else:
                        run_night(seed, on_disk=self.on_disk)
                except InvariantViolated as violation:
                    if self.without in str(violation).partition("\n")[0]:
                        return True
        return False


DEFENCES: list[Defence] = []


def defence(name: str, without: str, owner: Any, part: str, **options: Any) -> Any:
    """Register a stand-in for a part; it is called with the original before the arguments."""

    def register(stand_in: Callable[..., Any]) -> None:
        original = getattr(owner, part)

        def replaced(*arguments: Any, **named: Any) -> Any:
            return stand_in(original, *arguments, **named)

        take_away = partial(patch.object, owner, part, replaced)
        DEFENCES.append(Defence(name, without, take_away, **options))

    return register


def _nothing(*_: Any, **__: Any) -> None:
    """Do not."""


@defence("rows kept while the disk is full", "rows wait for room", Patience, "act", first=8)
def _forget_full_rows(act: Any, *arguments: Any) -> Any:
    with contextlib.suppress(StoreFull):
        return act(*arguments)


@defence("no start without room", "while rows wait for room", DelayedCommands, "take", first=8)
def _start_while_full(take: Any, delayed: DelayedCommands, command: Any, at: float) -> Any:
    return ([], True) if hasattr(command, "worker_id") else take(delayed, command, at)


@defence("fencing by attempt id", "final row", Schedule, "handle", first=48)
def _count_late_rows(handle: Any, schedule: Schedule, event: Event) -> list[Command]:
    """Count a result that comes after its attempt was given up."""

    def counted(command: Any) -> Any:
        late = isinstance(command, RecordRow) and command.reason.startswith("came after")
        return replace(command, reason="measured", final=True) if late else command

    return [counted(command) for command in handle(schedule, event)]


@defence("legal sets of cards only", "illegal card set", state, "legal_groups")
def _any_set(_: Any, __: Any, count: int, server_cards: int) -> tuple[tuple[int, ...], ...]:
    starts = range(server_cards - count, -1, -1)
    return tuple(tuple(range(start, start + count)) for start in starts)


@defence("a card is free when its process is gone", "the card has a worker already", Leases, "stop")
def _free_at_once(stop: Any, leases: Leases, worker: Any, reason: str) -> None:
    stop(leases, worker, reason)
    leases.gone(worker)


@defence("a write until all is written", "is lost", SimulatedDisk, "write", first=8, on_disk=True)
def _half_writes(write: Any, disk: SimulatedDisk, handle: int, data: bytes | memoryview) -> int:
    with contextlib.suppress(OSError):
        write(disk, handle, data)
    return len(data)


@defence("a limit to retries", "and is tried again", outcomes, "judge", first=2)
def _retry_for_ever(judge: Any, *arguments: Any, **counts: int) -> retry.Verdict:
    return replace(judge(*arguments, **counts), retry=True)


@defence("a pause before a retry", " s after ", Ledger, "retry", first=87)
def _retry_at_once(_: Any, __: Ledger, record: JobState, ___: float) -> None:
    record.pool.enqueue(record)


@defence("breaker counts failures", "others are tried", Breaker, "begun", first=867)
def _watch_the_first_only(begun: Any, breaker: Breaker, subject: str) -> None:
    """A place that becomes free goes to the next that is begun, whoever has failed meanwhile."""
    if len(breaker.subjects) < breaker.limit:
        begun(breaker, subject)


@defence("quarantine of nodes", "times and is used after", Pool, "join", first=4)
def _trust_nodes(join: Any, pool: Pool, node: Any) -> None:
    """A node that comes back is as good as a new one, however often it was lost."""
    pool.losses.clear()
    join(pool, node)


@defence("a deadline follows the clock", "the end of the time", Schedule, "handle", first=14)
def _deaf_to_clocks(handle: Any, schedule: Schedule, event: Event) -> list[Command]:
    set_again = isinstance(event, ClockSet) and event.by_s
    return handle(schedule, Tick(at=event.at) if set_again else event)


@defence(
    "steady clock of the watchdog", "a healthy worker is called hung", Night, "board", first=47
)
def _watch_by_the_time_of_day(board: Any, night: Night, plan: Any) -> Board:
    """Count a worker's time in its phase by the time of day, and all of a pause
    counts: else a step forward would pass for a pause of the driver."""
    ahead = night.wall() - night.steady()

    class Watch(Board):
        def overdue(self, now: float) -> list[WorkerOverdue]:
            return super().overdue(night.wall() - ahead)

    limits_s = board(night, plan).limits_s
    return Watch("night", plan, night.steady(), limits_s=limits_s, longest_pause_s=math.inf)


@defence("a budget that does not", "finished with workers left", Schedule, "handle", first=122)
def _moving_budgets(handle: Any, schedule: Schedule, event: Event) -> list[Command]:
    if isinstance(event, ClockSet):
        schedule.settings = replace(schedule.settings, follow_clock=True)
    return handle(schedule, event)


@defence("patience", "was away for a moment", Patience, "act", first=4)
def _impatient(_: Any, __: Patience, what: str, attempt: Callable[[], Any], ___: type) -> Any:
    return attempt()


@defence("refused stops are repeated", "has a process of driver", driver_module, "refusal", first=9)
def _free_what_was_not_stopped(refusal: Any, command: Any, error: Any, at: float) -> list[Event]:
    """A worker counts as stopped, although the executor did not take the command."""
    if isinstance(command, StopWorker):
        return [WorkerStopped(at=at, worker_id=command.worker_id)]
    return refusal(command, error, at)


@defence(
    "numbers of requests",
    "requests were read out of order or twice",
    protocol.Inbox,
    "new",
    of_channel=True,
)
def _as_they_come(_: Any, inbox: protocol.Inbox[Any], first: int, messages: Any) -> Any:
    inbox.received = max(inbox.received, first + len(messages) - 1)
    return messages


@defence(
    "unconfirmed messages are kept", "out of order", protocol.Outbox, "pending", of_channel=True
)
def _once_only(pending: Any, outbox: protocol.Outbox[Any], *timeout_s: float) -> tuple[int, Any]:
    first, messages = pending(outbox, *timeout_s)
    outbox.confirm(first + len(messages) - 1)
    return first, messages


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    with (
        patch.object(reader, "damage_of", _nothing),
        patch.object(log, "disk", SimpleNamespace(**{**vars(disk), "digest": lambda _: "0" * 16})),
    ):
        yield


def _of(owner: Any, name: str, new: Any = _nothing) -> Callable[[], Any]:
    return partial(patch.object, owner, name, new)


_jumping_clock = _of(Night, "steady", lambda night: night.now + night.set_by())
DEFENCES += [
    Defence(
        "the run's lock",
        "two drivers hold the run at once",
        _of(Lock, "acquire", lambda self: setattr(self.night, "holder", self.driver)),
        first=1,
    ),
    Defence("a look at the lock before each write", "two rows", _of(Lock, "still_mine"), first=1),
    Defence("orphans are ended", "has a process of driver", _of(Night, "end_leftovers")),
    Defence("a note of each attempt that runs", "is used twice", _of(Promises, "begin")),
    Defence(
        "attempt numbers go on",
        "is used twice",
        _of(Night, "attempts_before", lambda *_: {}),
        first=1,
    ),
    Defence(
        "rows before waiting", "the driver waits and rows are not safe", _of(RowWriter, "write")
    ),
    Defence("cards drained for gangs", "starves: ", _of(Placement, "_reserve"), first=7),
    Defence(
        "quarantine of cards",
        "on which no worker comes up, is tried",
        _of(Pool, "count_failure"),
        first=2,
    ),
    Defence(
        "another card",
        "runs where the last attempt failed",
        _of(JobState, "send_elsewhere"),
        first=4,
    ),
    Defence(
        "another card later",
        "runs where the last attempt failed",
        _of(Pool, "cards_came"),
        first=101_471,
    ),
    Defence(
        "an end to hopeless jobs",
        "no end after",
        _of(Pool, "newly_hopeless", lambda *_: []),
        first=11,
    ),
    Defence("file sync", "is lost", _of(SimulatedDisk, "sync"), first=18, on_disk=True),
    Defence(
        "directory sync", "is lost", _of(SimulatedDisk, "sync_directory"), first=40, on_disk=True
    ),
    Defence(
        "damaged numbers",
        "used twice",
        _of(Store, "attempts_set_aside", lambda *_: {}),
        first=91,
        on_disk=True,
    ),
    Defence(
        "interrupted rows",
        "is used twice",
        _of(store_module, "read_journal", lambda _: []),
        on_disk=True,
    ),
    Defence("steady durations", "about the time it took", _jumping_clock, first=39),
    Defence("steady timers", "s late", _jumping_clock, first=8),
    Defence("the watchdog", "no end after", _of(Board, "overdue", lambda *_: []), first=45),
    Defence("a card's rest after a failed start", "s of rest", _of(Pool, "rest")),
    Defence("the circuit breaker", "others are tried", _of(Breaker, "failure"), first=3),
    Defence("breaker's replacements", "others are tried", _of(Breaker, "withdrawn"), first=387),
    Defence(
        "needed jobs first",
        "runs before",
        _of(schedule_module, "Dependencies", lambda _, records: Dependencies([], records)),
    ),
    Defence("an end to stuck processes", "no end after", _of(RunEnding, "give_up")),
    Defence("no use of a stuck card", "no end after", _of(Pool, "lock_away"), first=11),
    Defence(
        "refusals are events",
        "no end after",
        _of(driver_module, "refusal", lambda *_: []),
        first=29,
    ),
    Defence(
        "requests sent again",
        "requests never arrive",
        _of(channel, "SEND_AGAIN_S", float("inf")),
        of_channel=True,
        first=6,
    ),
    Defence(
        "confirmed are dropped",
        "responses were heard out of order or twice",
        _of(protocol.Outbox, "confirm"),
        of_channel=True,
    ),
    Defence(
        "fresh processes",
        "is not fresh",
        _of(state.Worker, "fresh", property(lambda worker: worker.state is state.WorkerState.IDLE)),
    ),
    Defence(
        "no start of what has ended",
        "has ended and is started",
        _of(DelayedCommands, "forget_attempt"),
        first=588,
    ),
    Defence("checksums of rows", "", _no_checksums, first=44, on_disk=True),
]
