"""Traces of profiles, which are files beside the rows."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.core.errors import StoreError
from orchestrator.core.events import RecordRow
from orchestrator.results import paths
from orchestrator.runtime.row_store import RowStore


def keep_trace(store: RowStore, command: RecordRow, say: Callable[[str], object]) -> None:
    """Write the trace of an attempt, if it has one; a row is worth more than its trace."""
    ranks = command.outcome.ranks if command.outcome is not None else ()
    for result in (rank.result for rank in ranks):
        if result is not None and result.trace is not None and command.attempt is not None:
            name = paths.trace_of(command.attempt.attempt_id)
            try:
                store.write_file(name, result.trace)
            except (OSError, StoreError) as error:
                say(f"{name} is not kept: {error}")
