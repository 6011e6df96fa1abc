"""Messages between a driver and the agent of a node.

The driver sends requests and the agent responses, both in batches. Request batches and responses
are numbered and kept until the other side has confirmed their number, so that a call which is lost
on the way loses nothing and repeats nothing. An attempt is JSON and the outcome of a rank bytes
(``outcome_bytes.py``), which the driver and the worker process alone make and read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Failure, RankOutcome, WorkerInfo
from orchestrator.core.readings import Energy
from orchestrator.worker.card_process import Launch, Order
from orchestrator.worker.wire import compact
from workloads.devices.monitor.host import CardTelemetry

# ---------------------------------------------------------------- from the driver


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker process: answered by ``Started``."""

    launch: Launch


@dataclass(frozen=True, slots=True)
class Listen:
    """Have rank 0 of a gang open a rendezvous on ``address``: answered by ``Listened``."""

    worker_id: str
    attempt_id: str
    address: str


@compact
@dataclass(frozen=True, slots=True)
class Run:
    """Run one rank of an attempt: answered by ``Ended``."""

    worker_id: str
    order: Order
    card_index: int | None  # of a card whose energy can be read
    after: str = ""  # given ahead: it begins when this attempt has succeeded, or never


@dataclass(frozen=True, slots=True)
class Stop:
    """Kill the worker process: answered by ``Stopped``."""

    worker_id: str
    reason: str


Request = Start | Listen | Run | Stop

# ---------------------------------------------------------------- from the agent


@dataclass(frozen=True, slots=True)
class Started:
    """A worker is ready, or cannot start, and then its process is gone."""

    worker_id: str
    value: WorkerInfo | Failure


@dataclass(frozen=True, slots=True)
class Listened:
    """The rendezvous of a gang, or the Failure to open one."""

    worker_id: str
    attempt_id: str
    rendezvous: Any


@compact
@dataclass(frozen=True, slots=True)
class Ended:
    """A rank is over. The outcome is the worker process's own, as bytes, or the agent's when the
    process died; None if it never began: the worker was gone, or what went before it failed."""

    worker_id: str
    attempt_id: str
    outcome: bytes | RankOutcome | None
    process_gone: bool
    energy: Energy | None = None  # what the card took while the rank was timed
    readings: Mapping[str, str] = field(default_factory=dict)  # what it said meanwhile
    more: bool = False  # the worker has its next attempt, so nobody waits for the driver's answer


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process and its children are gone; the worker sends nothing after this."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Halted:
    """The process of a gang's rank does nothing any more, as seen from outside it."""

    worker_id: str
    attempt_id: str
    reason: str


Response = Started | Listened | Ended | Stopped | Halted


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """Responses of an agent, and the state of its node."""

    first: int  # number of the first response
    responses: tuple[Response, ...]
    received: int  # number of the last batch that was read; all before it were
    progress: Mapping[str, Progress] | None  # of every busy worker; None: not looked at again
    telemetry: Mapping[int, CardTelemetry] | None  # by index of the card; None: not read again
    server_gone: bool  # the process server is, and with it every worker

    @property
    def urgent(self) -> bool:
        """Return whether a worker may wait for what the driver makes of it."""
        return self.server_gone or any(map(is_urgent, self.responses))


def is_urgent(response: Response) -> bool:
    """Return whether a worker may wait for what the driver makes of a response."""
    return not (isinstance(response, Ended) and response.more)


# ---------------------------------------------------------------- numbers


#: A response that no worker waits for the answer to may wait so long for others.
GATHER_S = 0.01


class PendingResponses:
    """Responses that the driver has not acknowledged yet; for any thread."""

    def __init__(self) -> None:
        self._urgent = False  # whether one of them is of some haste
        self._changed = threading.Condition()
        self._kept: deque[Response] = deque()
        self._first = 1

    def put(self, response: Response) -> None:
        """Keep one more."""
        urgent = is_urgent(response)
        with self._changed:
            self._kept.append(response)
            self._urgent |= urgent
            if urgent or len(self._kept) == 1:
                self._changed.notify()

    def wake(self) -> None:
        """Let ``wait`` return early: there is other news."""
        with self._changed:
            self._urgent = True
            self._changed.notify()

    def acknowledge(self, number: int) -> None:
        """Forget all up to this one."""
        with self._changed:
            while self._kept and self._first <= number:
                self._kept.popleft()
                self._first += 1

    def wait(self, timeout_s: float) -> tuple[int, tuple[Response, ...]]:
        """All that are kept, and the number of the first; waits until there is one, or ``wake``.
        While all of them can, they wait a moment for others."""
        with self._changed:
            if not self._kept and not self._urgent:
                self._changed.wait(timeout_s)
            if self._kept and not self._urgent:
                self._changed.wait_for(lambda: self._urgent, min(timeout_s, GATHER_S))
            self._urgent = False
            return self._first, tuple(self._kept)


class Resequencer:
    """Puts batches that overtook others back into their order and drops those that came twice."""

    def __init__(self) -> None:
        self.received = 0
        self._early: dict[int, bytes] = {}

    def add(self, number: int, batch: bytes) -> list[bytes]:
        """The batches that are next, if any, now that this one is here."""
        if number > self.received:
            self._early[number] = batch
        ready = []
        while self.received + 1 in self._early:
            self.received += 1
            ready.append(self._early.pop(self.received))
        return ready
