"""The defences of a night, and a way to take each away for the tests.

Taking one away puts another part in its place; the programme itself knows nothing of it. Then some
night must break, and the seed says which: a check that nothing can fail would prove nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from disk_model import SimulatedDisk
from exchange import run_exchange
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
from orchestrator.driver.board import Watchdog
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


def _nothing(*_: Any, **__: Any) -> None:
    """Do not."""


def _no_commands(*_: Any, **__: Any) -> tuple[()]:
    return ()


Handle = Callable[[Event], list[Command]]


def _handling(
    handled: Callable[[Handle, Event], list[Command]],
) -> contextlib.AbstractContextManager[Any]:
    handle = Schedule.handle
    return patch.object(
        Schedule,
        "handle",
        lambda schedule, event: handled(lambda other: handle(schedule, other), event),
    )


def _forget_full_rows() -> contextlib.AbstractContextManager[Any]:
    act = Patience.act

    def dropping(patience: Patience, what: str, attempt: Callable[[], Any], last: type) -> Any:
        with contextlib.suppress(StoreFull):
            return act(patience, what, attempt, last)

    return patch.object(Patience, "act", dropping)


def _start_while_full() -> contextlib.AbstractContextManager[Any]:
    take = DelayedCommands.take

    def at_once(held: DelayedCommands, command: Any, at: float) -> tuple[list[Event], bool]:
        return ([], True) if hasattr(command, "worker_id") else take(held, command, at)

    return patch.object(DelayedCommands, "take", at_once)


def _count_late_rows() -> contextlib.AbstractContextManager[Any]:
    """Count a result that comes after its attempt was given up."""

    def counted(command: Command) -> Command:
        late = isinstance(command, RecordRow) and command.reason.startswith("came after")
        return replace(command, reason="measured", final=True) if late else command

    return _handling(lambda handle, event: [counted(command) for command in handle(event)])


def _any_set() -> contextlib.AbstractContextManager[Any]:
    def any_set(_: Any, count: int, server_cards: int) -> tuple[tuple[int, ...], ...]:
        starts = range(server_cards - count, -1, -1)
        return tuple(tuple(range(start, start + count)) for start in starts)

    return patch.object(state, "legal_groups", any_set)


def _reuse_workers() -> contextlib.AbstractContextManager[Any]:
    idle = property(lambda worker: worker.state is state.WorkerState.IDLE)
    return patch.object(state.Worker, "fresh", idle)


def _free_at_once() -> contextlib.AbstractContextManager[Any]:
    stop = Leases.stop

    def at_once(leases: Leases, worker: Any, reason: str) -> Iterator[Command]:
        yield from stop(leases, worker, reason)
        yield from leases.gone(worker, 0.0)

    return patch.object(Leases, "stop", at_once)


def _half_writes() -> contextlib.AbstractContextManager[Any]:
    write = SimulatedDisk.write

    def once(disk: SimulatedDisk, handle: int, data: bytes | memoryview) -> int:
        with contextlib.suppress(OSError):
            write(disk, handle, data)
        return len(data)

    return patch.object(SimulatedDisk, "write", once)


def _retry_for_ever() -> contextlib.AbstractContextManager[Any]:
    judge = retry.judge

    def always(kind: Any, message: str = "", **counts: int) -> retry.Verdict:
        return replace(judge(kind, message, **counts), retry=True)

    return patch.object(outcomes, "judge", always)


def _retry_at_once() -> contextlib.AbstractContextManager[Any]:
    return patch.object(Ledger, "retry", lambda _, pool, record, __: pool.enqueue(record) or ())


def _watch_the_first_only() -> contextlib.AbstractContextManager[Any]:
    """A place that becomes free goes to the next that is begun, whoever has failed meanwhile."""
    begin = Breaker.begun

    def while_there_is_room(breaker: Breaker, subject: str) -> None:
        if len(breaker.subjects) < breaker.limit:
            begin(breaker, subject)

    return patch.object(Breaker, "begun", while_there_is_room)


def _trust_nodes() -> contextlib.AbstractContextManager[Any]:
    """A node that comes back is as good as a new one, however often it was lost."""

    def join(pool: Pool, node: Any) -> Generator[Command, None, list[Any]]:
        yield from ()
        lost = pool.leave(node.node_id) if node.node_id in pool.cards.servers else []
        pool.cards.add(node)
        return lost

    return patch.object(Pool, "join", join)


def _deaf_to_clocks() -> contextlib.AbstractContextManager[Any]:
    def deaf(handle: Handle, event: Event) -> list[Command]:
        set_again = isinstance(event, ClockSet) and event.by_s
        return handle(Tick(at=event.at) if set_again else event)

    return _handling(deaf)


def _watch_by_the_time_of_day() -> contextlib.AbstractContextManager[Any]:
    """Count a worker's time in its phase by the time of day, and all of a pause
    counts: else a step forward would pass for a pause of the driver."""

    def watchdog(night: Night) -> Watchdog | None:
        class Watch(Watchdog):
            def overdue(self, cards: Any, now: float) -> list[WorkerOverdue]:
                return super().overdue(cards, night.wall())

        return Watch(longest_pause_s=math.inf) if night.shape.watched else None

    return patch.object(Night, "watchdog", watchdog)


def _moving_budgets() -> contextlib.AbstractContextManager[Any]:
    handle = Schedule.handle

    def move(schedule: Schedule, event: Event) -> list[Command]:
        if isinstance(event, ClockSet):
            schedule.settings = replace(schedule.settings, follow_clock=True)
        return handle(schedule, event)

    return patch.object(Schedule, "handle", move)


def _impatient() -> contextlib.AbstractContextManager[Any]:
    def at_once(patience: Patience, what: str, attempt: Callable[[], Any], last: type) -> Any:
        return attempt()

    return patch.object(Patience, "act", at_once)


def _free_what_was_not_stopped() -> contextlib.AbstractContextManager[Any]:
    """A worker counts as stopped, although the executor did not take the command."""
    refusal = driver_module.refusal

    def believed(command: Any, error: Exception, at: float) -> list[Event]:
        if isinstance(command, StopWorker):
            return [WorkerStopped(at=at, worker_id=command.worker_id)]
        return refusal(command, error, at)

    return patch.object(driver_module, "refusal", believed)


def _run_what_has_ended() -> contextlib.AbstractContextManager[Any]:
    """An attempt that waits for room is started, though its node went meanwhile."""
    return patch.object(DelayedCommands, "forget_attempt", _nothing)


def _as_they_come() -> contextlib.AbstractContextManager[Any]:
    def new(inbox: protocol.Inbox[Any], first: int, messages: Any) -> Any:
        inbox.received = max(inbox.received, first + len(messages) - 1)
        return messages

    return patch.object(protocol.Inbox, "new", new)


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    with (
        patch.object(reader, "damage_of", _nothing),
        patch.object(log, "disk", SimpleNamespace(**{**vars(disk), "digest": lambda _: "0" * 16})),
    ):
        yield


def _once_only() -> contextlib.AbstractContextManager[Any]:
    pending = protocol.Outbox.pending

    def forgetting(outbox: protocol.Outbox[Any], timeout_s: float = 0.0) -> tuple[int, Any]:
        first, messages = pending(outbox, timeout_s)
        outbox.confirm(first + len(messages) - 1)
        return first, messages

    return patch.object(protocol.Outbox, "pending", forgetting)


def _of(owner: Any, name: str, new: Any = _nothing) -> Callable[[], Any]:
    return lambda: patch.object(owner, name, new)


DEFENCES = (
    Defence(
        "the run's lock",
        "two drivers hold the run at once",
        _of(Lock, "acquire", lambda self: setattr(self.night, "holder", self.driver)),
    ),
    Defence("a look at the lock before each write", "two rows", _of(Lock, "still_mine")),
    Defence(
        "the end of what a dead driver left running",
        "has a process of driver",
        _of(Night, "end_leftovers"),
    ),
    Defence("a note of each attempt that runs", "is used twice", _of(Promises, "begin")),
    Defence(
        "numbers of attempts that go on from earlier drivers'",
        "is used twice",
        _of(Night, "attempts_before", lambda *_: {}),
    ),
    Defence(
        "rows before the driver waits",
        "the driver waits and rows are not safe",
        _of(RowWriter, "write"),
    ),
    Defence("rows kept while the disk is full", "rows wait for room", _forget_full_rows, first=8),
    Defence(
        "nothing started while rows wait for room",
        "while rows wait for room",
        _start_while_full,
        first=8,
    ),
    Defence("fencing by attempt id", "final row", _count_late_rows, first=48),
    Defence(
        "a card is free when its process is gone", "the card has a worker already", _free_at_once
    ),
    Defence("legal sets of cards only", "illegal card set", _any_set),
    Defence("fresh processes where they are asked for", "is not fresh", _reuse_workers),
    Defence(
        "cards drained for gangs", "starves: ", _of(Placement, "_reserve", _no_commands), first=7
    ),
    Defence(
        "quarantine of cards",
        "on which no worker comes up, is tried",
        _of(Pool, "count_failure", _no_commands),
        first=2,
    ),
    Defence(
        "another card for the next attempt",
        "runs where the last attempt failed",
        _of(JobState, "send_elsewhere"),
        first=4,
    ),
    Defence(
        "another card also when one comes later",
        "runs where the last attempt failed",
        _of(Pool, "cards_came"),
        first=101_471,
    ),
    Defence(
        "an end to jobs for which no cards are left",
        "no end after",
        _of(Pool, "newly_hopeless", lambda *_: []),
        first=11,
    ),
    Defence(
        "sync of a file before it gets its name",
        "is lost",
        _of(SimulatedDisk, "sync"),
        first=18,
        on_disk=True,
    ),
    Defence(
        "sync of the directory after it",
        "is lost",
        _of(SimulatedDisk, "sync_directory"),
        first=38,
        on_disk=True,
    ),
    Defence("a write until all is written", "is lost", _half_writes, first=8, on_disk=True),
    Defence("checksums of rows", "", _no_checksums, first=44, on_disk=True),
    Defence(
        "numbers of attempts whose rows are damaged",
        "used twice",
        _of(Store, "attempts_set_aside", lambda *_: {}),
        first=91,
        on_disk=True,
    ),
    Defence(
        "rows of attempts that a dead driver had running",
        "is used twice",
        _of(store_module, "read_journal", lambda _: []),
        on_disk=True,
    ),
    Defence(
        "durations by a clock that never jumps",
        "about the time it took",
        _of(Night, "steady", lambda night: night.now + night.set_by()),
        first=39,
    ),
    Defence(
        "a watchdog whose clock never jumps",
        "a healthy worker is called hung",
        _watch_by_the_time_of_day,
        first=47,
    ),
    Defence(
        "timers by a clock that never jumps",
        "s late",
        _of(Night, "steady", lambda night: night.now + night.set_by()),
        first=8,
    ),
    Defence(
        "a deadline that follows the time of day", "the end of the time", _deaf_to_clocks, first=14
    ),
    Defence("a budget that does not", "finished with workers left", _moving_budgets, first=122),
    Defence("the watchdog", "no end after", _of(Watchdog, "overdue", lambda *_: []), first=45),
    Defence("a limit to retries", "and is tried again", _retry_for_ever, first=2),
    Defence("a pause before a retry", " s after ", _retry_at_once, first=59),
    Defence("a card's rest after a failed start", "s of rest", _of(Pool, "rest", _no_commands)),
    Defence(
        "quarantine of nodes that are lost again and again",
        "times and is used after",
        _trust_nodes,
        first=4,
    ),
    Defence("the circuit breaker", "others are tried", _of(Breaker, "failure"), first=3),
    Defence(
        "a breaker that watches others for those withdrawn",
        "others are tried",
        _of(Breaker, "withdrawn"),
        first=387,
    ),
    Defence(
        "a breaker that counts who has failed already",
        "others are tried",
        _watch_the_first_only,
        first=867,
    ),
    Defence(
        "jobs that wait for those they need",
        "runs before",
        _of(schedule_module, "Dependencies", lambda _, records: Dependencies([], records)),
    ),
    Defence(
        "an end to waiting for a process that does not end",
        "no end after",
        _of(RunEnding, "give_up", _no_commands),
    ),
    Defence(
        "no use of a card whose process does not end",
        "no end after",
        _of(Pool, "lock_away"),
        first=11,
    ),
    Defence("patience with what fails for a moment", "was away for a moment", _impatient, first=4),
    Defence(
        "a command that is refused is an event",
        "no end after",
        _of(driver_module, "refusal", lambda *_: []),
        first=4,
    ),
    Defence(
        "a worker is stopped when the executor took the command",
        "has a process of driver",
        _free_what_was_not_stopped,
        first=9,
    ),
    Defence(
        "no start of what has ended while it waited for room",
        "has ended and is started",
        _run_what_has_ended,
        first=588,
    ),
    Defence(
        "numbers of requests",
        "requests were read out of order or twice",
        _as_they_come,
        of_channel=True,
    ),
    Defence(
        "requests sent again until they are confirmed",
        "requests never arrive",
        _of(channel, "SEND_AGAIN_S", float("inf")),
        of_channel=True,
        first=6,
    ),
    Defence("messages kept until they are confirmed", "out of order", _once_only, of_channel=True),
    Defence(
        "messages forgotten when they are confirmed",
        "responses were heard out of order or twice",
        _of(protocol.Outbox, "confirm"),
        of_channel=True,
    ),
)
