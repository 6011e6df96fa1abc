"""The queue of runs on one cluster, by priority, then first come, first served; no preemption.

Each run has one ticket, a key in the GCS that only its driver writes; one with a ``turn`` may claim
cards. Turns go in order to runs that share no kind of card with an earlier turn. A run writes that
it is ``taking`` its turn before it looks for rivals, so that of two at once one sees the other. A
ticket ends with its driver; a supervised run keeps its turn for ``GRACE_S``, and a driver silent
for ``SILENCE_S`` keeps its cards but blocks nobody.
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
    turn: bool = False  # it may claim cards
    taking: bool = False  # it is about to have its turn
    supervised: bool = False  # another driver comes should this one die
    beat: int = 0  # changes while the driver lives

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key among tickets."""
        return -self.priority, self.since, self.run_id

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
    rivals = sorted(
        (ticket for ticket in others if ticket.rivals(mine)), key=lambda ticket: ticket.order
    )
    having = [ticket for ticket in rivals if ticket.turn or ticket.taking]
    if mine.turn:  # a driver that was silent may be back
        before = tuple(t for t in having if t.turn and t.order < mine.order)
        return Standing(turn_due=False, may_claim=not before, ahead=before)
    waiting = [ticket for ticket in rivals if ticket not in having and ticket.order < mine.order]
    return Standing(turn_due=not (having or waiting), may_claim=False, ahead=(*having, *waiting))


class Watch:
    """Filters tickets: of living, responsive drivers, and of those about to be restarted."""

    def __init__(self) -> None:
        self._time_s = 0.0  # in which the queue could be looked at
        self._looked_at: float | None = None
        self._heard: dict[str, tuple[int, float]] = {}  # by driver: beat, when it came
        self._dead: dict[str, float] = {}  # by driver: when that was seen first
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
            if ticket.driver not in living:
                died = self._dead.setdefault(ticket.driver, at)
                if ticket.turn and ticket.supervised and at - died < GRACE_S:
                    counted.append(ticket)
                continue
            beat, heard = self._heard.get(ticket.driver, (None, at))
            if beat != ticket.beat:
                heard = at
                self._heard[ticket.driver] = (ticket.beat, at)
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
SUBMITTER = "submitter"


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
        submitted = self._submitted()
        if not self._mine.driver:
            # Take the turn of the run's earlier driver unless it was given on.
            earlier = self._tickets().get(self._mine.run_id)
            sent = submitted.get(self._mine.submission)
            self._mine = replace(
                self._mine,
                driver=self._driver(),
                since=sent.since if sent is not None else self._mine.since,
                taking=earlier is not None and earlier.turn,
            )
        self._write(beat=self._mine.beat + 1)
        drivers = self._drivers()
        known = {ticket.driver for ticket in self._tickets().values()}
        self.strangers = tuple(drivers[d] for d in sorted(drivers.keys() - known) if drivers[d])
        expected = [t for t in submitted.values() if t.submission != self._mine.submission]
        place = self._place(set(drivers), expected)
        if place.turn_due and not self._mine.taking:
            self._write(taking=True)
            place = self._place(set(drivers), expected)
        if self._mine.taking:
            is_free = not any(ticket.turn or ticket.taking for ticket in place.ahead)
            self._write(taking=False, turn=is_free)
            place = self._place(set(drivers), expected)
        return place

    def leave(self) -> None:
        """Give the place back."""
        if self._store is not None:
            self._store.internal_kv_del(_key(self._mine.run_id), False, NAMESPACE, _TIMEOUT_S)

    def _place(self, living: set[str], expected: Iterable[Ticket]) -> Standing:
        others = [
            ticket for ticket in self._tickets().values() if ticket.run_id != self._mine.run_id
        ]
        return standing(self._mine, self._watch.counting(self._clock(), others, living, expected))

    # ------------------------------------------------------------ what the GCS holds

    def _write(self, **changes: Any) -> None:
        """Change the ticket and write it."""
        self._mine = replace(self._mine, **changes)
        text = self._mine.to_json().encode()
        key = _key(self._mine.run_id)
        self._store.internal_kv_put(key, text, True, NAMESPACE, _TIMEOUT_S)

    def _tickets(self) -> dict[str, Ticket]:
        """All tickets, by id of the run."""
        keys = self._store.internal_kv_keys(_PREFIX.encode(), NAMESPACE, _TIMEOUT_S)
        texts = self._store.internal_kv_multi_get(keys, NAMESPACE, _TIMEOUT_S) if keys else {}
        tickets = (Ticket.from_json(text) for text in texts.values())
        return {ticket.run_id: ticket for ticket in tickets if ticket is not None}

    def _drivers(self) -> dict[str, str]:
        """Commands of living drivers by Ray's id; empty for Ray's own."""
        jobs = self._store.get_all_job_info(
            skip_submission_job_info_field=True,
            skip_is_running_tasks_field=True,  # it would query every driver
            timeout=_TIMEOUT_S,
        )
        rays = {
            i for i, job in jobs.items() if job.config.ray_namespace.startswith("_ray_internal")
        }
        return {
            job.job_id.hex(): "" if key in rays else redact(job.entrypoint[:80], os.environ)
            for key, job in jobs.items()
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


def _key(run_id: str) -> bytes:
    return f"{_PREFIX}{run_id}".encode()


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
