"""The plan of a grid: without a cluster, or of a run with its nodes and earlier rows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.domain.deadline import Deadline
from orchestrator.domain.job import Accelerator, State
from orchestrator.runtime.options import RunOptions

if TYPE_CHECKING:
    from orchestrator.domain.history import PastRow
    from orchestrator.domain.topology import Node
    from orchestrator.grid.model import Grid
    from orchestrator.planning.forecast import Forecast
    from orchestrator.planning.plan import Plan
    from orchestrator.results.store import Store
    from orchestrator.runtime.session import Session

#: States of the jobs that --retry-failed runs again.
_RETRIED = (State.FAILED, State.TIMED_OUT, State.OUT_OF_MEMORY, State.PRUNED)


def plan_grid(source: Grid | str | os.PathLike[str], options: RunOptions) -> Plan:
    """Plan a grid as ``run_grid`` would, on the nodes that are named or, without any, assumed.

    Raises:
        GridError: the grid is refused.
        ClusterError: the nodes make no sense.
        StoreError: earlier rows cannot be read.
    """
    from orchestrator.planning.planner import make_plan

    grid = grid_of(source, options, assumed=True)
    return make_plan(
        grid,
        planned_nodes(grid.accelerators(), options.emulate),
        earlier_rows(options.results, options.name or grid.name),
        retry_failed=options.retry_failed,
        force=options.force,
    )


def planned_nodes(accelerators: Sequence[Accelerator], emulate: str | None) -> list[Node]:
    """The nodes to plan for when no cluster is at hand, given the kinds of card a grid names.

    Raises:
        ClusterError: the specification is not understood.
    """
    from orchestrator.domain.topology import assumed_servers, parse_emulation
    from orchestrator.host.node_packages import with_own_packages

    if emulate is not None:
        return list(with_own_packages(parse_emulation(emulate, accelerators)))
    return assumed_servers(accelerators)


def earlier_rows(results: Path, run: str) -> list[PastRow]:
    """The rows of a run, oldest first; none if there is no such run yet. Reads only.

    Raises:
        StoreError: the rows cannot be read, or the name cannot be that of a run.
    """
    from orchestrator.results.store import Store

    return history_of(Store.open(results, run))


def grid_of(
    source: Grid | str | os.PathLike[str], options: RunOptions, *, assumed: bool = False
) -> Grid:
    """The grid of a file, or the one that is given.

    With emulated cards known, or assumed servers (``assumed``), card counts are refused together
    with all else in the file.

    Raises:
        GridError: it is refused.
    """
    from orchestrator.grid.model import Grid
    from orchestrator.grid.reader import load_grid

    if isinstance(source, Grid):
        return source
    known = assumed or options.emulate
    nodes_for = partial(planned_nodes, emulate=options.emulate) if known else None
    return load_grid(Path(source), nodes_for=nodes_for, overrides=options.overrides)


def plan_run(options: RunOptions, grid: Grid, session: Session, store: Store) -> Plan:
    """Plan the grid of a run on the nodes of its session, by the rows that it has."""
    from orchestrator.planning.planner import estimator_for, make_plan

    history = history_of(store)
    retry_failed, force = options.retry_failed, options.force
    counting = history
    if options.charge is not None and options.charge.again and (retry_failed or force):
        # Jobs that the drivers before this one measured again, as the user asked, are not
        # measured once more.
        this_time = _attempts_since(store, options.charge.began)
        counting = [
            row
            for row in history
            if (row.job_id, row.attempt_number) in this_time or not (force or row.state in _RETRIED)
        ]
        retry_failed = force = False
    return make_plan(
        grid,
        session.nodes,
        counting,
        retry_failed=retry_failed,
        force=force,
        estimator=estimator_for(history, session.nodes),
    )


def _attempts_since(store: Store, moment: float) -> set[tuple[str, int]]:
    """Job and number of each attempt whose row was recorded since then."""
    return {
        (row.job_id, row.attempt_number)
        for row in store.measurements()
        if (row.recorded_at or 0.0) >= moment
    }


def history_of(store: Store) -> list[PastRow]:
    """The rows of a run, oldest first; none if there is no such run yet."""
    return store.history() if store.exists else []


def forecast_of(plan: Plan, history: Sequence[PastRow], deadline: Deadline) -> Forecast | None:
    """Forecast how far a run that starts now would come; None when that takes too long to
    compute."""
    from orchestrator.planning.forecast import forecast
    from orchestrator.planning.planner import estimator_for

    return forecast(plan, estimator_for(history, plan.nodes), deadline.work_until - time.time())
