"""The note that an attempt begins: what its row is made of, should its driver die.

A driver notes every attempt before it begins (``results/begun.py``), and hardly any note is ever
read. So a note is not the row but what ``measurement_of`` takes to make it, put together from the
attempt's JSON, which its workers get as well, and from texts that attempts share.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from orchestrator.core.errors import SchemaMismatch, StoreError
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Attempt, Failure, FailureClass, Outcome, RankOutcome
from orchestrator.core.topology import Node
from orchestrator.results.derive import Provenance, measurement_of
from orchestrator.results.older_tables import refuse_newer
from orchestrator.results.schema import SCHEMA_VERSION
from orchestrator.results.tables import from_table, to_table
from orchestrator.results.validation import fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Note of an attempt that begins. ``text`` is a line of JSON."""

    attempt_id: str
    text: str

    def row(self) -> Measurement:
        """The row that the attempt gets if nothing more is ever heard of it: lost, not final.

        Raises:
            SchemaMismatch: a newer version wrote the note.
            StoreError: it is no note.
        """
        return row_of(self.text)


class Notes:
    """Makes the notes of one driver."""

    def __init__(
        self, *, run: str, invocation_id: str, provenance: Provenance | None = None
    ) -> None:
        known = provenance or Provenance()
        self._driver = json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "run": run,
                "invocation_id": invocation_id,
                "process": f"process {os.getpid()} on {socket.gethostname()}",
                "versions": dict(known.versions),
                "git_commit": known.git_commit,
                "git_dirty": known.git_dirty,
            }
        )

    def of(
        self, attempt: Attempt, at: float, nodes: Iterable[Node], *, ahead: bool = False
    ) -> Note:
        """The note of an attempt that begins at ``at``, epoch seconds, on cards of ``nodes``, or
        that is given ahead then."""
        where = ",".join(map(_node_text, nodes))
        more = ',"ahead":true' if ahead else ""
        text = (
            f'{{"driver":{self._driver},"at":{at!r},"nodes":[{where}]{more}'
            f',"attempt":{attempt.to_json()}}}'
        )
        return Note(attempt_id=attempt.attempt_id, text=text)


@lru_cache(maxsize=1024)
def _node_text(node: Node) -> str:
    """The fields of a node that a row contains, as JSON."""
    return json.dumps(
        {
            "node_id": node.node_id,
            "name": node.name,
            "accelerator": node.accelerator,
            "card_indices": node.card_indices,
            "device_name": node.device_name,
            "emulated": node.emulated,
        }
    )


def row_of(text: str) -> Measurement:
    """The row made from a note's text; see ``Note.row`` for the errors."""
    try:
        note = json.loads(text)
        refuse_newer(note["driver"]["schema_version"], "a note")
        row = _lost(Attempt.from_values(note["attempt"]), note)
        table = to_table([row], documented=False)
        if reason := fault(table):
            raise StoreError(reason)
        (as_read,) = from_table(table, source="a note")
        return as_read
    except SchemaMismatch:
        raise
    except Exception as error:  # records are made of whatever the JSON holds
        raise StoreError(f"not the note of an attempt: {error!r:.300}") from error


def _lost(attempt: Attempt, note: Mapping[str, Any]) -> Measurement:
    driver, at = note["driver"], note["at"]
    message = f"its driver, {driver['process']}, died while it ran"
    failure: Failure | None = Failure(failure_class=FailureClass.NODE_LOST, message=message)
    ranks: tuple[RankOutcome, ...] = ()
    if note.get("ahead"):
        message = f"given ahead by a driver that died, {driver['process']}; not known to have begun"
        failure = None
    else:
        rank = RankOutcome(rank=0, state=State.LOST, started_at=at, ended_at=at, failure=failure)
        ranks = (rank,)
    record = RecordRow(
        job=attempt.job,
        state=State.LOST,
        reason=message,
        final=False,
        attempt=attempt,
        outcome=Outcome(
            attempt_id=attempt.attempt_id, state=State.LOST, ranks=ranks, failure=failure
        ),
    )
    provenance = Provenance(
        versions=driver["versions"],
        git_commit=driver["git_commit"],
        git_dirty=driver["git_dirty"],
    )
    return measurement_of(
        record,
        run=driver["run"],
        invocation_id=driver["invocation_id"],
        recorded_at=at,
        provenance=provenance,
        nodes=[
            Node(**{**node, "accelerator": Accelerator(node["accelerator"])})
            for node in note["nodes"]
        ],
    )
