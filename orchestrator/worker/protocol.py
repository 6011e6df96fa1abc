"""Messages between driver, agents and worker processes, and how they travel.

Requests (driver to agent) and responses are numbered and resent from an ``Outbox`` until confirmed;
an ``Inbox`` drops duplicates. A rank's outcome travels as bytes that only its worker and the driver
unpickle, since a workload may put its own class into it. Pickles come only from processes that may
run code here anyway (docs/security.md); results and downloads are never pickles.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Attempt, Failure, RankOutcome, WorkerInfo
from orchestrator.core.readings import Energy
from orchestrator.core.topology import Card
from workloads.devices import host_device
from workloads.devices.monitor.host import CardTelemetry

T = TypeVar("T")

#: Part of a log that a row keeps.
TAIL_BYTES = 4000

# ---------------------------------------------------------------- what a worker is started with


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts that the agent of a node reports when it is ready."""

    threads: (
        int  # each worker's share of the host's cores, at least 1, or what NIGHTGRID_THREADS sets
    )
    version: str  # of Nightgrid there
    server: str  # socket of the node's spawner
    log_dir: str
    compiled: str = ""  # a directory for code that is compiled for its cards; it outlives Ray
    cards: tuple[str, ...] = ()  # indices of those that Ray gave the agent and that can be used
    cards_left_out: tuple[str, ...] = ()  # a line for each of those that cannot be used
    lost_cards: tuple[str, ...] = ()  # a line for each of the host's, Ray's or not
    uuids: Mapping[int, str] = field(default_factory=dict)  # of cards that go by them
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
    idle_memory_bytes: int | None = None  # in use on an idle card; None: unknown
    uuid: str = ""  # by which the card is shown to its process; empty: by its index
    lost_cards: tuple[str, ...] = ()  # of its host
    threads: int = 1  # for torch's CPU work
    world_size: int = 1
    #: Variables that must be set before torch is imported; the worker refuses to start without.
    environment: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""  # of process (``Job.process_kind``): what was decided before its imports
    check_card: bool = False  # whether the first attempt begins with a check of the card

    @property
    def device(self) -> str:
        """The torch device type."""
        return self.emulated_device if self.emulated else self.card.accelerator.device


# ---------------------------------------------------------------- requests of the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a worker process: answered by ``Started``."""

    worker_id: str
    server: str  # socket of the node's spawner
    factory: str  # "module:callable", called with ``config``
    config: Any  # with the ``kind`` of process at first, and its ``environment``
    #: Variables of the process beyond its agent's environment, for each kind of process.
    environments: Mapping[str, Mapping[str, str]]
    log: str  # file for stdout and stderr


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
    attempt: Attempt
    rank: int = 0
    rendezvous: Any = None  # of a gang; a Failure to open one ends the rank


@dataclass(frozen=True, slots=True)
class Stop:
    """Kill the worker process: answered by ``Stopped``."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Durable:
    """The rows of these attempts are synced, so the agent need not keep their outcomes."""

    attempt_ids: tuple[str, ...]


WorkerRequest = Start | Listen | Run | Stop
Request = WorkerRequest | Durable

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
    """A rank has ended. ``outcome``: the worker's, pickled; the agent's if the worker died; None if
    the rank never began."""

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
    """The process of a gang's rank has been stopped or is ending."""

    worker_id: str
    attempt_id: str
    reason: str


Response = Started | Listened | Ended | Stopped | Halted


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """Responses of an agent, and the state of its node."""

    first: int  # number of the first response
    responses: tuple[Response, ...]
    received: int  # number of the last request that was read; all before it were
    progress: Mapping[str, Progress] | None  # of every busy worker; None: not looked at again
    telemetry: Mapping[int, CardTelemetry] | None  # by index of the card; None: not read again
    server_gone: bool  # the spawner is, and with it every worker


# ---------------------------------------------------------------- numbered messages


class Outbox(Generic[T]):
    """Unconfirmed messages, numbered from 1; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[T] = deque()
        self._first = 1

    def put(self, message: T) -> None:
        """Add one."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def confirm(self, number: int) -> None:
        """Forget all up to this one."""
        with self._changed:
            while self._messages and self._first <= number:
                self._messages.popleft()
                self._first += 1

    def pending(self, timeout_s: float = 0.0) -> tuple[int, tuple[T, ...]]:
        """Wait for a message; return the first number and all unconfirmed messages."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages, timeout_s)
            return self._first, tuple(self._messages)


class Inbox(Generic[T]):
    """Drops duplicates. Every call carries all unconfirmed messages, so there are no gaps."""

    def __init__(self) -> None:
        self.received = 0

    def new(self, first: int, messages: Sequence[T]) -> Sequence[T]:
        """Return the new ones of these messages, which are numbered from ``first``."""
        fresh = messages[max(0, self.received + 1 - first) :]
        self.received += len(fresh)
        return fresh


# ---------------------------------------------------------------- bytes


def pickled(value: Any) -> bytes:
    """Pickle a value for ``unpickled`` in another process of the run."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpickled(data: bytes) -> Any:
    """Return a pickled value; raise any Exception for another version's or a workload's class."""
    return pickle.loads(data)
