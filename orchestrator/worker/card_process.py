"""The handle of a worker process (``worker_main.py``) in whoever owns the card.

It survives everything the process may do: a crash, a kill or a hang of the process becomes a
``RankOutcome`` with the signal and the end of the log. No Ray here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, RankOutcome, WorkerInfo
from orchestrator.host.clock import Interval
from orchestrator.worker.redaction import redacted_end
from orchestrator.worker.served_process import ServedProcess
from orchestrator.worker.wire import Channel, compact
from workloads.util import files

#: Part of a log that a row keeps.
TAIL_BYTES = 4000
#: Before it, for what is redacted as a whole: a key of many lines.
_BEFORE_TAIL_BYTES = 1 << 16
#: An order that was given ahead begins within so long after it came to the process, or never.
KEEP_S = 5.0
#: Of orders that the process has not answered: far less than a socket pair holds.
_MOST_SENT_BYTES = 1 << 15
#: The answer to an order that was given ahead is looked for so much later: to be woken by each of
#: many short jobs takes longer than they do.
GATHER_S = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Instructions for starting a worker process."""

    name: str  # the worker's id
    server: str  # socket of the node's process server
    factory: str  # "module:callable", called with ``config``
    config: Any
    #: Variables of the process beyond its parent's environment, for each kind of process.
    environments: Mapping[str, Mapping[str, str]]
    kind: str = ""  # which it is at first
    log: str  # file for stdout and stderr


@compact
@dataclass(frozen=True, slots=True)
class Order:
    """One rank of an attempt for a worker process, with what its owner has to know of it."""

    attempt_id: str
    label: str  # of the job
    kind: str  # which the process must be
    rank: int
    attempt: str  # as JSON
    rendezvous: Any = None  # what ``listen`` gave, for a gang; a Failure ends the rank


def _nothing() -> None:
    """Nobody is told."""


class CardProcess:
    """The owner's handle. ``start`` and ``run`` block, for one thread; ``progress`` and ``stop``
    may be called from another meanwhile."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._kind, self._config = launch.kind, launch.config
        self._process: ServedProcess | None = None
        self._channel: Channel | None = None
        self._progress: Progress | None = None
        self._info: WorkerInfo | None = None
        self._stopped_because: str | None = None
        self._gone = threading.Event()
        self._exit: Mapping[str, Any] = {}
        self._sent: dict[str, int] = {}  # orders that the process has or runs, and their sizes
        self._look_at = 0.0  # when those behind the first of them do not begin any more
        self._void = 0  # orders that the process has and that were given back already
        self.succeeded = False  # whether the last attempt did

    def start(self) -> WorkerInfo | Failure:
        """Start the process and wait until it is ready; a Failure when it cannot start, and then
        it is gone."""
        self._sent.clear()  # what an earlier process in this place had
        self._void = 0
        if self._stopped_because is not None:
            self._gone.set()
            return self._death("start")
        mine, theirs = socket.socketpair()
        environment = dict(os.environ) | dict(self._launch.environments[self._kind])
        paths = [path for path in sys.path if path]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        try:
            self._process = ServedProcess(
                self._launch.server,
                name=self._launch.name,
                environment=environment,
                log=self._launch.log,
                cwd=os.getcwd(),
                channel=theirs.detach(),
            )
        except OSError as error:
            self._gone.set()
            message = f"the node's process server does not answer: {error}"
            return Failure(failure_class=FailureClass.NODE_LOST, message=message)
        threading.Thread(target=self._watch, daemon=True).start()
        self._channel = Channel(mine.detach())
        if self._stopped_because is not None:  # stopped while it was being started
            self._process.kill()
        try:
            self._channel.send((self._launch.factory, self._config))
            kind, value = self._receive()
        except (EOFError, OSError):
            return self._death("start-up")
        if kind != "answer":
            self._gone.wait()
            return self._with_log(value)
        if self._stopped_because is not None:  # it answered before it was killed
            return self._death("start-up")
        self._info = value
        return self._info

    def listen(self, address: str) -> Any:
        """Have rank 0 open a rendezvous on ``address``: the rendezvous, or a Failure."""
        try:
            return self._ask("listen", address)[1]
        except (EOFError, OSError):
            return self._death("opening a rendezvous")

    def sent(self, attempt_id: str) -> bool:
        """Return whether the process has an order, which it will answer."""
        return attempt_id in self._sent

    def run(
        self, order: Order, ahead: Sequence[Order] = (), late: Callable[[], None] = _nothing
    ) -> bytes | RankOutcome | None:
        """Run one rank and wait for its end, whatever becomes of the process: its RankOutcome as
        the process pickled it, or one of our own when the process could not make any.

        The orders ``ahead`` go to the process, too, as far as there is room. It begins each when
        the one before it has succeeded, within ``KEEP_S``; else ``run`` returns None for it. Where
        ``order`` takes longer, ``late`` is called from time to time: none of them will begin.
        """
        lasted = Interval()
        self.succeeded = False
        self._progress = Progress(  # until the process says more, which a hang may keep it from
            worker_id=self._launch.name,
            attempt_id=order.attempt_id,
            phase="start",
        )
        failure = order.rendezvous
        try:
            if not isinstance(failure, Failure):
                failure = self._become(order.kind)
            if not isinstance(failure, Failure):
                followed = self.sent(order.attempt_id)
                if not followed:
                    self._begin(order)
                self._give_ahead(order, ahead)
                if followed and len(self._sent) > 1:
                    self._rest()
                kind, value = self._receive(late)
                self.succeeded = kind == "answer"
                if kind != "failed":
                    outcome: bytes | None = value
                    return outcome
                failure = value
        except (EOFError, OSError):
            self._sent.clear()
            self._void = 0
            failure = self._death(order.label)
        finally:
            self._sent.pop(order.attempt_id, None)
            self._progress = None
        return RankOutcome(
            rank=order.rank,
            state=State.LOST if self._was_ended else State.FAILED,
            started_at=lasted.started_at,
            ended_at=lasted.until_now(),
            failure=failure,
            worker=self._info,
        )

    def progress(self) -> Progress | None:
        """The process's last report of its activity; None when it is idle."""
        return self._progress

    def stop(self, reason: str) -> None:
        """Kill the process and its children and wait until they are gone."""
        if self._stopped_because is None and not self._gone.is_set():  # else it died of itself
            self._stopped_because = reason
        if self._process is not None:
            self._process.kill()
            self._gone.wait()

    @property
    def pid(self) -> int | None:
        """Number of the process; None where none was started."""
        return self._process.pid if self._process is not None else None

    @property
    def gone(self) -> bool:
        """Return whether the process and its children are gone."""
        return self._gone.is_set()

    @property
    def owes(self) -> bool:
        """Return whether the process, dead or alive, has an order that follows upon the last one:
        it may have answered that, too."""
        return self.succeeded and bool(self._sent) and self._stopped_because is None

    @property
    def _was_ended(self) -> bool:
        """Return whether the process was taken away from its job, rather than ended by it."""
        return self._stopped_because is not None or "server_lost" in self._exit

    def _become(self, kind: str) -> Failure | None:
        """Be a process of this kind: another takes this one's place if it is not. Engines change
        their process for good, and a card's mode is decided before torch is imported."""
        if kind == self._kind or kind not in self._launch.environments:
            return None  # a kind that this card never has is for the worker to refuse
        if self._process is not None:
            self._process.kill()
            self._gone.wait()
        environment = self._launch.environments[kind]
        self._kind, self._config = kind, replace(self._config, kind=kind, environment=environment)
        self._exit = {}
        self._gone = threading.Event()  # of the new one, before anybody can wait for it
        started = self.start()
        return started if isinstance(started, Failure) else None

    def _give_ahead(self, order: Order, ahead: Sequence[Order]) -> None:
        """Send orders that follow upon one, together and as far as the pipe has room: were it full,
        process and owner would wait for each other."""
        if self._channel is None:
            raise EOFError("the process was never started")
        self._look_at = deadline = time.monotonic() + KEEP_S
        if not ahead:
            return
        messages = []
        room = _MOST_SENT_BYTES - sum(self._sent.values())
        for each in ahead:
            if each.attempt_id in self._sent:
                continue
            size = len(each.attempt)
            if each.kind != order.kind or size > room:
                break
            self._sent[each.attempt_id] = size
            room -= size
            messages.append(("follow", (each.attempt, each.rank, deadline)))
        try:
            self._channel.send(*messages)
        except OSError:  # it has died; what it answered before can still be read
            for _ in messages:
                self._sent.popitem()

    def _begin(self, order: Order) -> None:
        """Send an order that follows upon nothing."""
        if self._channel is None:
            raise EOFError("the process was never started")
        self._sent[order.attempt_id] = len(order.attempt)
        self._channel.send(("run", (order.attempt, order.rank, order.rendezvous)))

    def _rest(self) -> None:
        """Let answers gather: this order began when the last answer was sent, and those behind it
        may be over as soon."""
        assert self._channel is not None
        if not self._channel.has_read:
            time.sleep(GATHER_S)

    def _ask(self, method: str, *arguments: Any) -> tuple[str, Any]:
        if self._channel is None:
            raise EOFError("the process was never started")
        self._channel.send((method, arguments))
        return self._receive()

    def _receive(self, late: Callable[[], None] | None = None) -> tuple[str, Any]:
        """The next answer; progress is kept on the way."""
        assert self._channel is not None
        while True:
            if late is not None:
                self._wait(late)
            kind, value = self._channel.receive()
            if kind == "progress":
                self._progress = value
            elif kind == "unbegun" and self._void:
                self._void -= 1
            else:
                return kind, value

    def _wait(self, late: Callable[[], None]) -> None:
        """Wait for a message. Once what was sent ahead does not begin any more, have it given back,
        with all that has come since: the process answers one order before it looks at the clock and
        begins the next, so an order whose answer is not there by then has no follower."""
        assert self._channel is not None
        while not self._channel.poll(max(0.0, self._look_at - time.monotonic())):
            if time.monotonic() >= self._look_at and not self._channel.poll(0):
                head = next(iter(self._sent))
                self._void += len(self._sent) - 1
                self._sent = {head: self._sent[head]}
                late()
                self._look_at = time.monotonic() + KEEP_S

    def _watch(self) -> None:
        assert self._process is not None
        try:
            self._exit = self._process.wait()
        except (OSError, ValueError):
            self._exit = {"server_lost": True}
        self._gone.set()

    def _death(self, doing: str) -> Failure:
        """Wait for the end of the process and say how it died."""
        if self._process is not None and not self._gone.wait(5):
            self._process.kill()  # it closed its channel and lives on
            self._gone.wait()
        if self._stopped_because is not None:
            text = f"stopped: {self._stopped_because}"
            return self._with_log(Failure(failure_class=FailureClass.HANG, message=text))
        if self._exit.get("host_oom"):
            text = f"the kernel killed the worker for want of host memory during {doing}"
            return self._with_log(
                Failure(failure_class=FailureClass.HOST_OUT_OF_MEMORY, message=text)
            )
        if "server_lost" in self._exit:
            text = f"the node's process server ended, and with it the worker, during {doing}"
            return self._with_log(Failure(failure_class=FailureClass.NODE_LOST, message=text))
        status = self._exit.get("exit", 0)
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        text = f"the worker process {how} during {doing}"
        return self._with_log(Failure(failure_class=FailureClass.CRASH, message=text))

    def _with_log(self, failure: Failure) -> Failure:
        return Failure(
            failure_class=failure.failure_class,
            message=failure.message,
            tail=failure.tail or self._tail(),
            log=f"{socket.gethostname()}:{self._launch.log}",
        )

    def _tail(self) -> str:
        """The end of the log, without the secrets that the process was given."""
        given = {**os.environ, **self._launch.environments.get(self._kind, {})}
        return tail_of(self._launch.log, given)


def tail_of(log: str, environment: Mapping[str, str]) -> str:
    """The end of a log file, from a line start, without the secrets of ``environment``; empty when
    there is none."""
    try:
        with files.opened(log, follow=False) as file:
            start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES - _BEFORE_TAIL_BYTES)
            file.seek(start)
            data = file.read(TAIL_BYTES + _BEFORE_TAIL_BYTES)
    except OSError:
        return ""
    text = data.decode("utf-8", errors="replace")
    return redacted_end(text, TAIL_BYTES, environment, cut=start > 0)
