"""Rows that did not succeed, grouped by cause, so that one bug is read once.

A night with one missing package can leave a thousand failed rows. They are grouped by state,
failure class and the shape of their reason (numbers, addresses and paths blanked), with the tail
of one log and the place where it lies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement

#: Answers, not accidents: the question "does this setting work here?" was settled.
SETTLED = frozenset({State.SUCCEEDED, State.OUT_OF_MEMORY, State.UNSUPPORTED, State.PRUNED})

#: Order in which causes are told: what needs someone's hands comes first.
STATE_ORDER = (
    State.FAILED,
    State.TIMED_OUT,
    State.LOST,
    State.NOT_STARTED,
    State.OUT_OF_MEMORY,
    State.PRUNED,
    State.UNSUPPORTED,
    State.RUNNING,
    State.PENDING,
    State.SUCCEEDED,
)

_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{16}(?:-\d+)?\b|\d[\d.,]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason, and the rows that share it. ``example`` is the newest that has a log's tail."""

    state: State
    failure_class: str
    reason: str  # of the example
    rows: tuple[Measurement, ...]
    example: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """A job that needed more than one attempt, and how each of them ended, oldest first."""

    row: Measurement  # the final one
    attempts: tuple[Measurement, ...]


def causes_of(rows: Sequence[Measurement]) -> tuple[Cause, ...]:
    """Rows that did not succeed, by cause; accidents first, then by how many rows share one."""
    groups: dict[tuple[State, str, str], list[Measurement]] = {}
    for row in rows:
        if row.state is not State.SUCCEEDED:
            key = (row.state, row.failure_class or "", _VARIABLE.sub("#", row.reason))
            groups.setdefault(key, []).append(row)
    causes = [
        Cause(
            state=state,
            failure_class=failure_class,
            reason=(example := _example(group)).reason,
            rows=tuple(group),
            example=example,
        )
        for (state, failure_class, _), group in groups.items()
    ]
    return tuple(sorted(causes, key=lambda c: (STATE_ORDER.index(c.state), -len(c.rows))))


def without_rule(cause: Cause) -> str:
    """The reason without the rule of retries behind it, or before it in rows of older versions."""
    kind = re.escape(cause.failure_class)
    told = re.sub(
        rf" \({kind}(?: after \d+ attempts?[;,]|; retry \d).*$", "", cause.reason, flags=re.S
    )
    return re.sub(rf"^{kind} after \d+ attempts?; limit is \d+ retr\w+ \(.*?\): ", "", told)


def retried(
    measurements: Sequence[Measurement], final: Mapping[str, Measurement]
) -> tuple[Retried, ...]:
    """Jobs with several measuring attempts in the invocation of their final row."""
    attempts: dict[str, list[Measurement]] = {}
    for row in measurements:
        last = final.get(row.job_id)
        if (
            last is not None
            and row.purpose == "measure"
            and row.invocation_id == last.invocation_id
            and row.started_at is not None
        ):
            attempts.setdefault(row.job_id, []).append(row)
    return tuple(
        Retried(row=final[job_id], attempts=tuple(sorted(rows, key=lambda r: r.attempt_number)))
        for job_id, rows in attempts.items()
        if len(rows) > 1
    )


def _example(rows: Sequence[Measurement]) -> Measurement:
    with_tail = [row for row in rows if row.failure_tail]
    return (with_tail or list(rows))[-1]
