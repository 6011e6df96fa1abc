"""The queue of runs on one cluster, by priority, then first come, first served; no preemption.

Each run has one ticket; one with a ``turn`` may claim cards. Turns go in the order of the queue to
runs that share no kind of card with an earlier turn. Tickets and turns are numbered by one
sequence, so of two runs that take turns at once only the one with the lower number claims.

A ticket ends with its driver, as Ray reports it; a supervised run keeps its turn for ``GRACE_S``. A
driver silent for ``SILENCE_S`` keeps its cards but blocks nobody.

Tickets are keys in the GCS, written only if absent; the highest is never deleted, so numbers are
unique. Everything here runs in the thread that calls the GCS (``gcs.py``).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from orchestrator.on_ray.gcs import gcs_client
from orchestrator.store.files import RAY_JOB_VARIABLE
from orchestrator.util.format import listed
from orchestrator.util.redaction import redact

#: Time for a supervisor to restart a killed driver.
GRACE_S = 120.0
SILENCE_S = 60.0
#: Time for an earlier submitted run to start its driver and take its ticket.
ARRIVAL_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """A run's options for the queue."""

    since: float  # when the command was typed, seconds since the epoch
    priority: int = 0
    supervised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A run's place in the queue."""

    run: str
    run_id: str
    host: str  # where its driver is
    kinds: tuple[str, ...]  # of card, as grids name them
    since: float  # when it was sent or typed, seconds since the epoch
    driver: str  # Ray's id of it
    submission: str = ""  # id of the Ray job that the driver is, if it is one
    priority: int = 0  # higher goes first
    number: int = 0  # in the sequence; 0: not there yet
    turn: int = 0  # the number with which it may claim cards; 0: not yet
    supervised: bool = False  # another driver comes should this one die
    beat: int = 0  # changes while the driver lives
    over: bool = False  # remains only to reserve its number

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key among waiting tickets."""
        return -self.priority, self.since, self.number

    def rivals(self, other: Ticket) -> bool:
        """Return whether both want a kind of card."""
        return self.run_id != other.run_id and bool(set(self.kinds) & set(other.kinds))

    def __str__(self) -> str:
        return f"{self.run} (on {self.host})"

    def to_json(self) -> str:
        """The ticket as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Ticket | None:
        """The ticket in a text; None where another version wrote it."""
        try:
            values: Mapping[str, Any] = json.loads(text)
            known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
            return cls(**known | {"kinds": tuple(map(str, known["kinds"]))})
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The place of a run in the queue at one moment."""

    turn_due: bool  # it should take a turn now
    may_claim: bool
    ahead: tuple[Ticket, ...]  # that it waits for, in their order

    @property
    def why(self) -> str:
        """Describe the runs ahead; empty if there are none."""
        if not self.ahead:
            return ""
        having = [str(ticket) for ticket in self.ahead if ticket.turn]
        waiting = [str(ticket) for ticket in self.ahead if not ticket.turn]
        texts = [f"{listed(having)} has the cards"] if having else []
        texts += [f"{listed(waiting)} came first or has a higher priority"] if waiting else []
        return "; ".join(texts)


def standing(mine: Ticket, others: Iterable[Ticket]) -> Standing:
    """The place of a run, given the tickets that count (``counting``)."""
    rivals = [ticket for ticket in others if not ticket.over and ticket.rivals(mine)]
    before = sorted(
        (t for t in rivals if t.turn and (not mine.turn or t.turn < mine.turn)),
        key=lambda ticket: ticket.turn,
    )
    if mine.turn:
        return Standing(turn_due=False, may_claim=not before, ahead=tuple(before))
    waiting = sorted(
        (ticket for ticket in rivals if not ticket.turn and ticket.order < mine.order),
        key=lambda ticket: ticket.order,
    )
    ahead = (*before, *waiting)
    return Standing(turn_due=not ahead, may_claim=False, ahead=ahead)


def inherited(mine: Ticket, tickets: Iterable[Ticket], living: Collection[str]) -> Ticket:
    """My ticket with a dead predecessor's turn, unless a rival already has a later one."""
    turns = [ticket for ticket in tickets if ticket.turn and not ticket.over]
    dead = [t for t in turns if t.run_id == mine.run_id and t.driver not in living]
    if not dead:
        return mine
    last = max(dead, key=lambda ticket: ticket.turn)
    later = [t for t in turns if t.turn > last.turn and t.driver in living and t.rivals(mine)]
    return mine if later else replace(mine, number=last.number, turn=last.turn)


class Watch:
    """Filters tickets: of living, responsive drivers, and of those about to be restarted."""

    def __init__(self) -> None:
        self._time_s = 0.0  # in which the queue could be looked at
        self._looked_at: float | None = None
        self._heard: dict[int, tuple[int, float]] = {}  # by number: beat, when it came
        self._dead: dict[int, float] = {}  # by number: when that was seen first
        self._expected: dict[str, float] = {}  # by submission: when it was seen first

    def counting(
        self,
        now: float,
        tickets: Iterable[Ticket],
        living: Collection[str],
        submitted: Iterable[Ticket] = (),
    ) -> list[Ticket]:
        """The tickets that count at ``now`` (monotonic seconds), given the ``living`` drivers.

        ``submitted`` runs without a ticket count for ``ARRIVAL_S``.
        """
        if self._looked_at is not None:  # a long gap is not silence of others
            self._time_s += min(now - self._looked_at, 10.0)
        self._looked_at = now
        at = self._time_s
        counted, arrived = [], set()
        for ticket in tickets:
            arrived.add(ticket.submission)
            if ticket.over:
                continue
            if ticket.driver not in living:
                died = self._dead.setdefault(ticket.number, at)
                if ticket.turn and ticket.supervised and at - died < GRACE_S:
                    counted.append(ticket)
                continue
            self._dead.pop(ticket.number, None)
            beat, heard = self._heard.get(ticket.number, (None, at))
            if beat != ticket.beat:
                heard = at
                self._heard[ticket.number] = (ticket.beat, at)
            if at - heard < SILENCE_S:
                counted.append(ticket)
        for ticket in submitted:
            first = self._expected.setdefault(ticket.submission, at)
            if ticket.submission not in arrived and at - first < ARRIVAL_S:
                counted.append(ticket)
        return counted


NAMESPACE = b"nightgrid"
_PREFIX = "queue/"
_TIMEOUT_S = 10
#: Ray's own records of submitted jobs.
_JOBS_NAMESPACE, _JOB_PREFIX = b"job", b"_ray_internal_job_info_"
#: Metadata of a submitted run (``jobs.py``).
MADE_BY, RUN, RESULTS, KINDS, PRIORITY = "made_by", "run", "results", "kinds", "priority"


class RunQueue:
    """This run's place in the joined cluster's queue for ``kinds`` of card."""

    def __init__(
        self,
        *,
        run: str,
        run_id: str,
        kinds: tuple[str, ...],
        options: QueueOptions,
        client: Callable[[], Any] = gcs_client,
        driver: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_client = client
        self._driver = driver or _driver_here
        self._store: Any = None
        self._clock = clock
        self._watch = Watch()
        self.strangers: tuple[str, ...] = ()  # commands of drivers on the cluster without a ticket
        self._mine = Ticket(
            run=run,
            run_id=run_id,
            host=socket.gethostname(),
            kinds=kinds,
            since=options.since,
            driver="",
            submission=_submission_here(),
            priority=options.priority,
            supervised=options.supervised,
        )

    def look(self) -> Standing:
        """Renew the ticket, take a turn if one is due, and return the run's standing."""
        if self._store is None:
            self._store = self._make_client()
        tickets, drivers = self._tickets(), self._drivers()
        living = set(drivers)
        submitted = self._submitted()
        if not self._mine.number:
            self._arrive(tickets, living, submitted)
            tickets = self._tickets()
        self._mine = replace(self._mine, beat=self._mine.beat + 1)
        self._put(self._mine, overwrite=True)
        known = {ticket.driver for ticket in tickets.values()} | {self._mine.driver}
        self.strangers = tuple(
            drivers[ticket] for ticket in sorted(living - known) if drivers[ticket]
        )
        expected = [t for t in submitted.values() if t.submission != self._mine.submission]
        place = self._place(tickets, living, expected)
        if not place.turn_due:
            return place
        before = self._mine
        self._number(turn=True)
        self._delete(before.number)
        # A concurrent turn was written before, or its run will see this one.
        return self._place(self._tickets(), living, expected)

    def _place(
        self, tickets: Mapping[int, Ticket], living: set[str], expected: Iterable[Ticket]
    ) -> Standing:
        others = [ticket for number, ticket in tickets.items() if number != self._mine.number]
        return standing(self._mine, self._watch.counting(self._clock(), others, living, expected))

    def leave(self) -> None:
        """Give the place back."""
        if self._store is not None and self._mine.number:
            self._mine = replace(self._mine, over=True)
            self._put(self._mine, overwrite=True)
            self._delete(self._mine.number)

    def _arrive(
        self, tickets: Mapping[int, Ticket], living: set[str], submitted: Mapping[str, Ticket]
    ) -> None:
        """Take a ticket or inherit an earlier driver's; delete stale ones."""
        mine = replace(self._mine, driver=self._driver())
        if sent := submitted.get(mine.submission):
            mine = replace(mine, since=sent.since)
        self._mine = inherited(mine, tickets.values(), living)
        for number, ticket in tickets.items():
            stale = ticket.run_id == mine.run_id and ticket.driver not in living
            if ticket.over or (stale and number != self._mine.number):
                self._delete(number)
        if not self._mine.number:
            self._number(turn=False)

    def _number(self, *, turn: bool) -> None:
        while True:
            number = max(self._numbers(), default=0) + 1
            ticket = replace(self._mine, number=number, turn=number if turn else 0)
            if not self._put(ticket, overwrite=False):
                continue
            if max(self._numbers()) == number:
                self._mine = ticket
                return
            self._delete(number)  # a higher one was given out meanwhile, and lower ones deleted

    # ------------------------------------------------------------ what the GCS holds

    def _put(self, ticket: Ticket, *, overwrite: bool) -> bool:
        """Write a ticket; false if its number is taken and is not to be overwritten."""
        added = self._store.internal_kv_put(
            _key(ticket.number), ticket.to_json().encode(), overwrite, NAMESPACE, _TIMEOUT_S
        )
        return bool(added)

    def _numbers(self) -> list[int]:
        keys = self._store.internal_kv_keys(_PREFIX.encode(), NAMESPACE, _TIMEOUT_S)
        return [int(key.decode().removeprefix(_PREFIX)) for key in keys]

    def _tickets(self) -> dict[int, Ticket]:
        keys = list(map(_key, self._numbers()))
        if not keys:
            return {}
        texts = self._store.internal_kv_multi_get(keys, NAMESPACE, _TIMEOUT_S)
        tickets = (Ticket.from_json(text) for text in texts.values())
        return {ticket.number: ticket for ticket in tickets if ticket is not None}

    def _delete(self, number: int) -> None:
        if number < max(self._numbers(), default=0):
            self._store.internal_kv_del(_key(number), False, NAMESPACE, _TIMEOUT_S)

    def _drivers(self) -> dict[str, str]:
        """Commands of living drivers by Ray's id; empty for Ray's own."""
        jobs = self._store.get_all_job_info(
            skip_submission_job_info_field=True,
            skip_is_running_tasks_field=True,  # it would query every driver
            timeout=_TIMEOUT_S,
        )
        return {
            job.job_id.hex(): "" if _is_rays_own(job) else redact(job.entrypoint[:80], os.environ)
            for job in jobs.values()
            if not job.is_dead
        }

    def _submitted(self) -> dict[str, Ticket]:
        """The runs that were sent as Ray jobs and have not ended, by submission id."""
        keys = self._store.internal_kv_keys(_JOB_PREFIX, _JOBS_NAMESPACE, _TIMEOUT_S)
        texts = self._store.internal_kv_multi_get(keys, _JOBS_NAMESPACE, _TIMEOUT_S) if keys else {}
        runs = {}
        for key, text in texts.items():
            submission = key.decode().removeprefix(_JOB_PREFIX.decode())
            ticket = submitted_ticket(submission, json.loads(text))
            if ticket is not None:
                runs[submission] = ticket
        return runs


def submitted_ticket(submission: str, job: Mapping[str, Any]) -> Ticket | None:
    """The ticket that a submitted run will take; None for other or ended jobs."""
    metadata = job.get("metadata") or {}
    known = metadata.get(MADE_BY) == "nightgrid" and KINDS in metadata
    if not known or job.get("status") not in ("PENDING", "RUNNING"):
        return None
    return Ticket(
        run=str(metadata.get(RUN, submission)),
        run_id=submission,
        host="its way to the cluster",
        kinds=tuple(str(metadata[KINDS]).split(",")),
        since=(job.get("start_time") or 0) / 1000,
        driver="",
        submission=submission,
        priority=int(metadata.get(PRIORITY, 0)),
    )


def _is_rays_own(job: Any) -> bool:
    return str(job.config.ray_namespace).startswith("_ray_internal")


def _key(number: int) -> bytes:
    return f"{_PREFIX}{number:012d}".encode()


def _driver_here() -> str:
    import ray

    return str(ray.get_runtime_context().get_job_id())


def _submission_here() -> str:
    """Id of the Ray job whose command this process is; empty if it is none."""
    try:
        config = json.loads(os.environ.get(RAY_JOB_VARIABLE, "{}"))
        return str(config.get("metadata", {}).get("job_submission_id", ""))
    except ValueError:
        return ""
