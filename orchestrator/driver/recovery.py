"""Recovery from earlier drivers of a run: their rows count on, what they left running is ended."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.core.errors import ClusterError
from orchestrator.core.job import State
from orchestrator.scheduler.queues import replicated_cells
from orchestrator.store.history import cards_of_succeeded

if TYPE_CHECKING:
    from orchestrator.core.plan import PastRow, Plan
    from orchestrator.store.store import Store
    from orchestrator.worker.orphans import Owner


def owner_of(store: Store) -> Owner:
    """The owner of what drivers of this run leave on a host."""
    from orchestrator.worker.orphans import Owner

    return Owner(run_id=store.run_id, invocation_id=uuid.uuid4().hex[:12])


def clear_up(store: Store, say: Callable[[str], None]) -> None:
    """End what earlier drivers of the run left on this host, and say what became of it. The
    agents do the same on their nodes, before these join (``on_ray/actors.py``).

    Raises:
        ClusterError: something of it does not end.
    """
    from orchestrator.worker.orphans import Owner, end_orphans

    if store.taken_over_from is not None:
        say(f"taken over from a driver that died: {store.taken_over_from}")
    owner = Owner.of_this_process()
    assert owner is not None
    try:
        ended = end_orphans(owner)
    except TimeoutError as error:
        raise ClusterError(f"{error}; end them, then start the run again") from error
    if ended:
        some = ", ".join(f"{each.pid} {each.command[:40]}" for each in ended[:3])
        more = f" and {len(ended) - 3} more" if len(ended) > 3 else ""
        say(f"ended its orphan processes here: {some}{more}")
    for note in store.notes:
        say(note)
    _tell_interrupted(store, say)


def _tell_interrupted(store: Store, say: Callable[[str], None]) -> None:
    """Say what a dead driver had running."""
    for attempt_id in store.interrupted:
        say(f"attempt {attempt_id} was running then: LOST, its job is tried again")


def attempts_before(
    history: Sequence[PastRow], set_aside: Mapping[str, int] | None = None
) -> dict[str, int]:
    """The number of the last attempt at each job that has rows, damaged ones included: the next one
    goes on from it."""
    numbers = dict(set_aside or {})
    for row in history:
        numbers[row.job_id] = max(row.attempt_number, numbers.get(row.job_id, 0))
    return numbers


def cards_before(plan: Plan, store: Store) -> dict[str, set[tuple[str, int]]]:
    """The cards on which replicates of each cell have been measured, by the cell's id: names of
    nodes, since a cluster that was started again has other ids, and indices."""
    cells = replicated_cells(planned.job for planned in plan.jobs)
    if not cells or not store.exists:
        return {}
    cell_of = {p.job.job_id: p.job.cell_id for p in plan.jobs if p.job.cell_id in cells}
    found: dict[str, set[tuple[str, int]]] = {}
    for job_id, node, index in cards_of_succeeded(store.tables_path):
        if job_id in cell_of:
            found.setdefault(cell_of[job_id], set()).add((node, index))
    return found


def final_states(plan: Plan, history: Sequence[PastRow]) -> dict[str, State]:
    """State of each job of the plan: that of its newest final row on the same footing."""
    # A kind of card that is not there is not emulated either: its rows say so.
    emulated = {node.accelerator: node.emulated for node in plan.nodes}
    newest = {(row.job_id, row.emulated): row.state for row in history if row.final}
    states = {}
    for planned in plan.jobs:
        job = planned.job
        key = (job.job_id, emulated.get(job.accelerator, False))
        states[job.job_id] = newest.get(key, State.NOT_STARTED)
    return states
