"""One run of a grid, from the plan to the last row: `nightgrid run` and ``orchestrator.run``.

Everything that can be refused is refused before anything starts. Started again, a run measures
only what has no terminal row yet. Rows are safe as soon as they are announced. What a driver that
died has left behind (rows of attempts it had running, processes) is settled before anything starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.domain.deadline import Deadline
from orchestrator.domain.job import State
from orchestrator.planning.plan import Action
from orchestrator.results import paths
from orchestrator.runtime.drive import drive
from orchestrator.runtime.earlier import (
    clear_up,
    final_states,
    owner_of,
)
from orchestrator.runtime.grid_before import change_of, refuse_another
from orchestrator.runtime.grid_plan import forecast_of, grid_of, history_of, plan_run
from orchestrator.runtime.nodes import cards_by_kind, with_its_nodes
from orchestrator.runtime.options import (
    RunOptions,
    kept_options,
    seed_of,
    with_cards_of,
    with_results_of,
)

if TYPE_CHECKING:
    from orchestrator.grid.model import Grid
    from orchestrator.planning.plan import Plan
    from orchestrator.results.mirror import Mirror
    from orchestrator.results.store import Store
    from orchestrator.runtime.driver import DriveResult
    from orchestrator.runtime.session import Session

Say = Callable[[str], None]

_ELSEWHERE = "give the `results:` of its grid as --results DIR, or name the grid file"

_ANSWERED = {State.SUCCEEDED, State.OUT_OF_MEMORY, State.PRUNED, State.UNSUPPORTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Outcome of a run. ``states`` has every job of the plan, and is empty when it was cut
    short."""

    store: Store
    plan: Plan
    result: DriveResult
    states: Mapping[str, State]
    mirror: Mirror | None = None  # of the results at an address

    @property
    def answered(self) -> bool:
        """Return whether every job has an answer: measured, or known not to fit or not to exist
        here."""
        return self.result.finished and all(state in _ANSWERED for state in self.states.values())


def run_grid(
    source: Grid | str | os.PathLike[str], options: RunOptions, say: Say = lambda _: None
) -> RunOutcome:
    """Plan a grid and measure what has not been measured yet.

    Args:
        source: the grid, or its file.
        options: where and how.
        say: told what will happen and where rows lie, before it happens.

    Raises:
        GridError: the grid is refused.
        ClusterError: there are no usable cards.
        StoreError: results cannot be read or written, or another driver holds the run.
    """
    from orchestrator.results.stop_file import forget_requests
    from orchestrator.results.store import Store
    from orchestrator.runtime.row_log import RowLog, close_all
    from orchestrator.trackers import tracker_of
    from workloads.models import protection, remote_code

    grid = grid_of(source, options)
    options = with_results_of(grid, options)
    trackers = [tracker_of(text) for text in options.log_to]
    _check_models(grid, options.remote_code)
    store = Store.open(options.results, options.name or grid.name)
    options.tell(run=store.run, results=str(options.results.resolve()))
    if options.resume and (store.exists or not options.again):
        store = Store.existing(options.results, store.run).resume()
        options = with_cards_of(store.path, options)
    store.adopt(*options.adopt)
    store.refuse_if_held()  # before the cluster is asked, which may be away
    change = None if options.again else change_of(grid, store.path)
    if change is not None:
        refuse_another(grid, change, store.run, {row.job_id for row in history_of(store)})
    with (
        remote_code.permitted(options.remote_code),
        protection.key_named(options.key_file),
        _session(options, grid) as session,
    ):
        session = with_its_nodes(options, session, say, store.path)
        session = replace(session, nodes=session.asked(session.nodes))
        options.tell(address=session.address, cards=cards_by_kind(session.nodes))
        plan = plan_run(options, grid, session, store)  # refused here, nothing is created
        with store, owner_of(store).marks_this_process(), _begun(session, plan, store):
            options.tell(drives=True)
            if not options.again:
                forget_requests(store.path)  # those for drivers that have ended
            # Once more under the lock: another driver may just have finished the same run.
            plan = plan_run(options, grid, session, store)
            deadline = _deadline(options, plan)
            _announce(session, plan, store, deadline, say)
            for line in change.lines() if change is not None else ():
                say(line)
            clear_up(store, say)
            mirror = _mirror(options, store, say)
            logs = [RowLog(store, *each) for each in trackers]
            store.write_file(paths.GRID, grid.text)
            if grid.commits:
                store.write_file(paths.REVISIONS, json.dumps(grid.commits, indent=1))
            seed = seed_of(store.path)
            store.write_file(
                paths.OPTIONS, kept_options(options, seed, cards_by_kind(session.nodes))
            )
            with contextlib.closing(mirror) if mirror else contextlib.nullcontext():
                for log in logs:
                    log.start()
                hurry = True
                try:
                    result = drive(options, session, plan, store, deadline, seed, say, mirror, logs)
                    hurry = deadline is not None or not result.finished
                finally:
                    for told in close_all(logs, hurry=hurry):
                        say(told)
            forget_requests(store.path)
            states = final_states(plan, store.history()) if result.finished else {}
    return RunOutcome(store=store, plan=plan, result=result, states=states, mirror=mirror)


def grid_to_resume(options: RunOptions) -> tuple[Path, str]:
    """The grid file and the name of the run that is to be gone on with: the newest one, if
    ``options`` name none.

    Raises:
        StoreError: there is no such run.
    """
    from orchestrator.errors import StoreError
    from orchestrator.results.store import Store
    from orchestrator.results.stored_run import runs

    known = runs(options.results)
    if options.name is None and not known:
        raise StoreError(f"no run to resume in {options.results}; {_ELSEWHERE}")
    try:
        store = Store.existing(options.results, options.name or known[0])
    except StoreError as error:
        raise StoreError(f"{error} To resume one that lies elsewhere, {_ELSEWHERE}") from None
    grid = store.path / paths.GRID
    if not os.path.isfile(grid):
        raise StoreError(f"run {store.run!r} has no {grid.name}; name the grid file to resume it")
    return grid, store.run


# ---------------------------------------------------------------- before


def _begun(session: Session, plan: Plan, store: Store) -> contextlib.AbstractContextManager[None]:
    """Begin what takes longest at once, beside all else that comes before the first job."""
    if not any(planned.action is Action.RUN for planned in plan.jobs):
        return contextlib.nullcontext()
    return session.begun(store.path / paths.LOGS, plan.host_packages)


def _check_models(grid: Grid, named: Sequence[str]) -> None:
    """Refuse a permission for a model that the grid does not have: it is a slip of the pen."""
    from orchestrator.errors import GridError, Problem
    from workloads.models.hub import split

    known = {job.model for job in grid.jobs()} if named else set()
    models = sorted(known | {split(model)[0] for model in known})
    problems = [
        Problem(
            file=grid.file,
            line=None,
            column=None,
            path="",
            message=f"--remote-code {name}: no job has this model",
            hint=f"the models are: {', '.join(models)}",
        )
        for name in named
        if name not in models
    ]
    if problems:
        raise GridError(problems)


def _session(options: RunOptions, grid: Grid) -> contextlib.AbstractContextManager[Session]:
    from orchestrator.errors import OptionError
    from orchestrator.runtime import session
    from orchestrator.scheduling.run_queue import QueueOptions

    kinds = grid.accelerators()
    if options.emulate is not None and (options.address or options.in_process):
        raise OptionError("--emulate cannot be combined with --address or --in-process")
    if options.in_process:
        return session.in_process_session(kinds, options.card_memory_bytes)
    if options.emulate is not None:
        return session.emulated_session(options.emulate, kinds, options.card_memory_bytes)
    if not (options.address or os.environ.get("RAY_ADDRESS")):
        return session.own_session(kinds)
    charge = options.charge
    place = QueueOptions(
        priority=options.priority,
        since=charge.began if charge is not None else time.time(),
        supervised=charge is not None,
    )
    return session.cluster_session(options.address, kinds, place)


def _deadline(options: RunOptions, plan: Plan) -> Deadline | None:
    if options.ends_at is None:
        return None
    return Deadline.of(options.ends_at, now=time.time(), jobs=len(plan.jobs))


def _announce(
    session: Session, plan: Plan, store: Store, deadline: Deadline | None, say: Say
) -> None:
    """Say what will happen and where rows will lie, before it happens."""
    from orchestrator.results.directory import inside_ray_job
    from orchestrator.watching.plan_text import deadline_lines, nodes_text, summary_lines

    say(f"Run {store.run}: grid {plan.grid_name}, {len(plan.jobs)} jobs")
    say(f"cards: {nodes_text(plan.nodes)}")
    for line in summary_lines(plan):
        say(line)
    if deadline is not None:
        for line in deadline_lines(deadline, forecast_of(plan, history_of(store), deadline)):
            say(line)
    passing = " (the working directory of a Ray job is thrown away)" if inside_ray_job() else ""
    say(f"rows: {store.tables_path.resolve()}{passing}")


def _mirror(options: RunOptions, store: Store, say: Say) -> Mirror | None:
    """The copy of the results at an address, which follows the run from now on.

    Raises:
        StoreError: the address cannot be written, or another run has its name there.
    """
    from orchestrator.results.mirror import Mirror

    if not options.results_address:
        return None
    mirror = Mirror(store.path, options.results_address, store.run_id, again=options.again)
    say(f"a copy of the rows goes to {mirror.address}")
    mirror.start()
    return mirror
