"""The queue of runs in the cluster's control store, which outlives every driver.

Each run keeps its ticket (``scheduling/run_queue.py``) there under a number that is given out once:
a key is written only if it is not there yet. Whether a driver lives is Ray's own knowledge, so one
that is killed leaves the queue without a word. The highest key is never deleted, so that its number
is not given out again. Everything here runs in the thread that asks the control store
(``gcs.py``).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.results.directory import RAY_JOB_VARIABLE
from orchestrator.scheduling.run_queue import (
    QueueOptions,
    Standing,
    Ticket,
    Watch,
    inherited,
    standing,
)
from orchestrator.worker.redaction import redact

NAMESPACE = b"nightgrid"
_PREFIX = "queue/"
_TIMEOUT_S = 10
#: Ray's own records of submitted jobs.
_JOBS_NAMESPACE, _JOB_PREFIX = b"job", b"_ray_internal_job_info_"
#: Metadata of a submitted run (``jobs.py``).
MADE_BY, RUN, RESULTS, KINDS, PRIORITY = "made_by", "run", "results", "kinds", "priority"


class RunQueue:
    """The place of this process's run in the queue of the cluster that it has joined.

    Args:
        kinds: of card that it wants, as grids name them.
        client: makes a client of the control store.
        driver: says what Ray calls this process.
    """

    def __init__(
        self,
        *,
        run: str,
        run_id: str,
        kinds: tuple[str, ...],
        options: QueueOptions,
        client: Callable[[], Any] | None = None,
        driver: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_client = client or _client
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
        """Renew the ticket, and say where the run stands; take a turn if one is due."""
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
        known = {each.driver for each in tickets.values()} | {self._mine.driver}
        self.strangers = tuple(drivers[each] for each in sorted(living - known) if drivers[each])
        others = [each for each in tickets.values() if each.number != self._mine.number]
        expected = [each for each in submitted.values() if each.submission != self._mine.submission]
        counting = self._watch.counting(self._clock(), others, living, expected)
        found = standing(self._mine, counting)
        if not found.turn_due:
            return found
        before = self._mine
        self._number(turn=True)
        self._delete(before.number)
        # Who took a turn in the same moment wrote it before or will see this one.
        return standing(
            self._mine,
            self._watch.counting(
                self._clock(),
                [t for t in self._tickets().values() if t.number != self._mine.number],
                living,
                expected,
            ),
        )

    def leave(self) -> None:
        """Give the place back."""
        if self._store is not None and self._mine.number:
            self._mine = replace(self._mine, over=True)
            self._put(self._mine, overwrite=True)
            self._delete(self._mine.number)

    def _arrive(
        self, tickets: Mapping[int, Ticket], living: set[str], submitted: Mapping[str, Ticket]
    ) -> None:
        """Take a ticket, or take up that of an earlier driver; drop those that nobody will."""
        mine = replace(self._mine, driver=self._driver())
        if sent := submitted.get(mine.submission):
            mine = replace(mine, since=sent.since)
        self._mine = inherited(mine, tickets.values(), living)
        for number, ticket in tickets.items():
            theirs = ticket.run_id == mine.run_id and ticket.driver not in living
            if ticket.over or (theirs and number != self._mine.number):
                self._delete(number)
        if not self._mine.number:
            self._number(turn=False)

    def _number(self, *, turn: bool) -> None:
        """Write the ticket under the next number of the sequence."""
        while True:
            number = max(self._numbers(), default=0) + 1
            ticket = replace(self._mine, number=number, turn=number if turn else 0)
            if not self._put(ticket, overwrite=False):
                continue
            if max(self._numbers()) == number:
                self._mine = ticket
                return
            self._delete(number)  # a higher one was given out meanwhile, and lower ones deleted

    # ------------------------------------------------------------ what the control store holds

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
        found = self._store.internal_kv_multi_get(keys, NAMESPACE, _TIMEOUT_S)
        tickets = (Ticket.from_json(text) for text in found.values())
        return {ticket.number: ticket for ticket in tickets if ticket is not None}

    def _delete(self, number: int) -> None:
        if number < max(self._numbers(), default=0):
            self._store.internal_kv_del(_key(number), False, NAMESPACE, _TIMEOUT_S)

    def _drivers(self) -> dict[str, str]:
        """The drivers that have not ended, by Ray's id: their commands; empty for Ray's own."""
        jobs = self._store.get_all_job_info(
            skip_submission_job_info_field=True,
            skip_is_running_tasks_field=True,  # for which each driver would be asked
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
        found = self._store.internal_kv_multi_get(keys, _JOBS_NAMESPACE, _TIMEOUT_S) if keys else {}
        runs = {}
        for key, text in found.items():
            submission = key.decode().removeprefix(_JOB_PREFIX.decode())
            ticket = submitted_ticket(submission, json.loads(text))
            if ticket is not None:
                runs[submission] = ticket
        return runs


def submitted_ticket(submission: str, job: Mapping[str, Any]) -> Ticket | None:
    """The ticket that a submitted run will take; None for a job that is none, or has ended."""
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


def _client() -> Any:
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

    return GcsClient(address=ray.get_runtime_context().gcs_address)


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
