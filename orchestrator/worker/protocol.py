"""Messages between driver, agents and worker processes, and how they travel.

The driver sends requests to the agent of a node and the agent responses, both in batches. Request
batches and responses are numbered and repeated until the other side has confirmed their number, so
that a call which is lost on the way loses nothing and repeats nothing. An agent and its worker
process exchange messages over a socket pair (``Channel``). An attempt travels as JSON, and the
outcome of a rank as bytes that only its worker process and the driver read.

This is the one place where anything is unpickled. The bytes come through Ray, through a socket pair
between a process and its parent, or from a node's directory of kept outcomes, which only the run's
user may enter: from processes that may run code here anyway (docs/security.md). Results, files of
others and downloads are never read so.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Failure, RankOutcome, WorkerInfo
from orchestrator.core.readings import Energy
from orchestrator.core.topology import Card
from workloads.devices import host_device
from workloads.devices.monitor.host import CardTelemetry

#: Part of a log that a row keeps.
TAIL_BYTES = 4000

# ---------------------------------------------------------------- what a worker is started with


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts that the agent of a node reports when it is ready."""

    hostname: str
    address: str  # by which other nodes reach it
    cores: int  # physical ones that this host gives us
    threads: int  # each worker's share of them, at least 1, or what NIGHTGRID_THREADS sets
    version: str  # of Nightgrid there
    server: str  # socket of the node's spawner
    log_dir: str
    compiled: str = ""  # a directory for code that is compiled for its cards; it outlives Ray
    cards: tuple[str, ...] = ()  # indices of those that Ray gave the agent, as Ray words them
    #: By card: memory in use on those that were idle when the agent came. Emulated ones have none.
    idle_memory_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of a worker."""

    worker_id: str
    card: Card
    node_name: str
    emulated: bool
    emulated_device: str = host_device().name  # the software that drives a card which is not there
    memory_bytes: int | None = None  # of an emulated card: enforced; None: no limit
    idle_memory_bytes: int | None = None  # in use on a card that nobody has; None: not known
    threads: int = 1  # for torch's CPU work
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    #: Variables that the process must have had before torch was imported. The worker refuses to
    #: start without, since setting them later would have no effect.
    environment: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""  # of process (``Job.process_kind``): what was decided before its imports
    passport: bool = False  # whether the first attempt begins with a check of the card

    @property
    def device(self) -> str:
        """The torch device type."""
        return self.emulated_device if self.emulated else self.card.accelerator.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Instructions for starting a worker process."""

    name: str  # the worker's id
    server: str  # socket of the node's spawner
    factory: str  # "module:callable", called with ``config``
    config: Any
    #: Variables of the process beyond its agent's environment, for each kind of process.
    environments: Mapping[str, Mapping[str, str]]
    kind: str = ""  # of process at first
    log: str  # file for stdout and stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One rank of an attempt for a worker process, with what its agent needs to know of it."""

    attempt_id: str
    label: str  # of the job
    kind: str  # of process that the job needs
    rank: int
    attempt: str  # as JSON
    rendezvous: Any = None  # of a gang; a Failure to open one ends the rank


# ---------------------------------------------------------------- requests of the driver


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


@dataclass(frozen=True, slots=True)
class Run:
    """Run one rank of an attempt: answered by ``Ended``."""

    worker_id: str
    order: Order
    card_index: int | None  # of a card whose energy can be read


@dataclass(frozen=True, slots=True)
class Stop:
    """Kill the worker process: answered by ``Stopped``."""

    worker_id: str
    reason: str


Request = Start | Listen | Run | Stop

# ---------------------------------------------------------------- responses of an agent


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


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank is over. The outcome is the worker process's own, as bytes, or the agent's when the
    process died; None if the worker was gone before the rank began."""

    worker_id: str
    attempt_id: str
    outcome: bytes | RankOutcome | None
    process_gone: bool
    energy: Energy | None = None  # of the card while the rank was timed
    readings: Mapping[str, str] = field(default_factory=dict)  # of the card meanwhile


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
    server_gone: bool  # the spawner is, and with it every worker


# ---------------------------------------------------------------- numbered batches


class PendingResponses:
    """Responses that the driver has not acknowledged yet; for any thread."""

    def __init__(self) -> None:
        self._woken = False
        self._changed = threading.Condition()
        self._responses: deque[Response] = deque()
        self._first = 1

    def put(self, response: Response) -> None:
        """Add one."""
        with self._changed:
            self._responses.append(response)
            self._changed.notify()

    def wake(self) -> None:
        """Let ``wait`` return early: there is other news."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def acknowledge(self, number: int) -> None:
        """Forget all up to this one."""
        with self._changed:
            while self._responses and self._first <= number:
                self._responses.popleft()
                self._first += 1

    def wait(self, timeout_s: float) -> tuple[int, tuple[Response, ...]]:
        """All pending responses, and the number of the first; waits until there is one, or
        ``wake``."""
        with self._changed:
            self._changed.wait_for(lambda: self._responses or self._woken, timeout_s)
            self._woken = False
            return self._first, tuple(self._responses)


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


# ---------------------------------------------------------------- bytes


def pickled(value: Any) -> bytes:
    """Pickle a value for ``unpickled`` in another process of the run."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpickled(data: bytes) -> Any:
    """Return the value of which ``pickled`` made these bytes.

    Raises:
        Exception: of many kinds: the other process is of another version, or a workload has put a
            class of its own into its result.
    """
    return pickle.loads(data)


class Channel:
    """One end of a socket pair, for whole messages. One thread at a time may send, and one thread
    receives."""

    _SIZE = struct.Struct("=Q")  # before each message: both ends are on one host

    def __init__(self, handle: int) -> None:
        """``handle`` is the descriptor of the socket, and is closed here."""
        self._handle = handle
        self._file = os.fdopen(handle, "rb", closefd=False)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: nobody receives any more.
        """
        data = pickled(message)
        left = memoryview(self._SIZE.pack(len(data)) + data)
        while left:
            left = left[os.write(self._handle, left) :]

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: the other end is closed.
            OSError: it was closed before all was read there.
        """
        (size,) = self._SIZE.unpack(self._read(self._SIZE.size))
        return unpickled(self._read(size))

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        """Close this end."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()
