"""One run of a grid, from the plan to the last row: `nightgrid run` and ``orchestrator.run``.

Everything that can be refused is refused before anything starts. A resumed run measures only jobs
without a terminal row, after cleaning up after a dead driver (rows of its running attempts,
processes). Announced rows are durable.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.analysis.metrics import named_figures
from orchestrator.analysis.rankings import doubt_of
from orchestrator.core.deadline import Deadline
from orchestrator.core.errors import ClusterError, GridError, OptionError, Problem, StoreError
from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Measurement, Prediction
from orchestrator.core.plan import Action, PastRow, Plan
from orchestrator.core.status import RunStatus
from orchestrator.core.topology import Node, legal_card_sets
from orchestrator.driver import session as sessions
from orchestrator.driver.answers import (
    MOST_CELLS,
    order_of,
    predictions_of,
    with_files,
    write_files,
)
from orchestrator.driver.board import PHASE_LIMITS_S, Board
from orchestrator.driver.local import InProcessExecutor
from orchestrator.driver.loop import CardChecks, Driver, DriveResult
from orchestrator.driver.options import (
    RunOptions,
    kept_options,
    kinds_of,
    seed_of,
    with_cards_of,
    with_results_of,
)
from orchestrator.driver.plan import (
    change_of,
    forecast_of,
    grid_of,
    history_of,
    plan_run,
    refuse_another,
    refuse_anothers,
    refuse_files,
    refuse_without_key,
    running,
    start_of,
)
from orchestrator.driver.recovery import (
    attempts_before,
    cards_before,
    clear_up,
    final_states,
    measured_again,
    owner_of,
    recover_outcomes,
)
from orchestrator.driver.rows import row_maker, with_room
from orchestrator.driver.session import Session
from orchestrator.driver.standing import Standing
from orchestrator.driver.supervisor import MERGE_IN_JOB_S, StopSignal
from orchestrator.grid.parser import Grid
from orchestrator.on_ray.run_queue import QueueOptions
from orchestrator.on_ray.run_status import serve_results
from orchestrator.planning.forecast import CLUSTER
from orchestrator.planning.planner import estimator_for
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.store import files as run_files
from orchestrator.store.files import inside_ray_job, remove_stop_requests, stop_requests
from orchestrator.store.history import table_of
from orchestrator.store.reader import runs
from orchestrator.store.remote import Mirror
from orchestrator.store.store import Store
from orchestrator.trackers.base import RowLog, close_all, tracker_of
from orchestrator.util.format import duration
from orchestrator.util.host import HOME_REMEDY, home_problem, usable_cores
from orchestrator.util.redaction import redact
from orchestrator.watch.live import open_view
from orchestrator.watch.plan_text import deadline_lines, nodes_text, summary_lines
from orchestrator.worker.orphans import Owner
from workloads.models import encryption, loading
from workloads.models.hub import split

if TYPE_CHECKING:
    from orchestrator.search.order import SearchOrder

Say = Callable[[str], None]


def drive(
    options: RunOptions,
    session: Session,
    plan: Plan,
    store: Store,
    history: Sequence[PastRow],
    deadline: Deadline | None,
    seed: int,
    say: Say,
    mirror: Mirror | None = None,
    logs: Sequence[RowLog] = (),
    order: SearchOrder | None = None,
) -> DriveResult:
    """Run the plan on the session's executor, which is started only if anything is to run."""
    owner = Owner.of_this_process()
    assert owner is not None
    board = Board(
        run=store.run,
        plan=plan,
        started_at=time.monotonic() - options.under_way_s(),
        start=start_of(options),
        processors=len(usable_cores()),
        final_rows=sum(row.final for row in history),
        # In this very process nothing but the whole run could be ended.
        limits_s={} if options.in_process else PHASE_LIMITS_S,
    )
    made = row_maker(store, owner.invocation_id, history, lambda: board.nodes or plan.nodes)
    board.standing = standing = Standing(made)
    if order is not None:
        order.figures = lambda record: named_figures(standing.measurement(record))
        order.doubt = lambda record: doubt_of(standing.measurement(record))
        board.answers = lambda now: (
            order.answers(now) if now < inf else with_files(order.answers(), plan)
        )
    again = measured_again(plan, standing, store, options) if history else {}
    if again:
        say(f"flagged rows that are measured again: {len(again)}")

    def publish(status: RunStatus) -> None:
        if status.counts.get(State.SUCCEEDED):
            options.report(succeeded=True)  # should this driver die, the next one's breaker rests
        session.publish(status)

    def logged(row: Measurement) -> None:
        for log in logs:
            log.take(row)

    # Handle signals from after the executor opens (Ray sets its own handlers) until it has closed:
    # an impatient Ctrl-C must not leave processes behind.
    with contextlib.ExitStack() as signals, contextlib.ExitStack() as stack:
        if again or any(planned.action is Action.RUN for planned in plan.jobs):
            say(f"starting on {session.description} …")
            logs_dir = store.path / run_files.LOGS
            opening = session.executor(store.run, logs_dir, plan.host_packages, board.label)
            executor = stack.enter_context(opening)
        else:
            executor = stack.enter_context(contextlib.closing(InProcessExecutor([])))
        merge_s = MERGE_IN_JOB_S if inside_ray_job() else 0.0
        stop = signals.enter_context(StopSignal(merge_s).on_signals())
        view = stack.enter_context(contextlib.closing(open_view(quiet=options.quiet)))
        outer = (executor, mirror, *logs)  # they may be in trouble while work goes on
        settings = ScheduleSettings(
            seed=seed,
            check_cards=options.passports,
            succeeded_before=options.supervisor is not None and options.supervisor.succeeded,
            follow_clock=not options.budget,
        )
        if deadline is not None:
            until, stop_s = deadline.work_until, deadline.stop_s
            settings = replace(settings, work_until=until, stop_s=stop_s)
        set_aside = store.attempts_set_aside(planned.job.job_id for planned in plan.jobs)
        schedule = Schedule(
            plan.jobs,
            settings,
            estimator_for(history, plan.nodes),
            attempts_before=attempts_before(history, set_aside),
            cards_before=cards_before(plan, store),
            judge=standing,
            again=again,
            order=order,
        )
        return Driver(
            schedule=schedule,
            executor=executor,
            store=store,
            to_measurement=standing.row_of,
            board=board,
            view=view,
            publish=publish,
            logged=logged,
            trouble=lambda: next(filter(None, (getattr(e, "trouble", "") for e in outer)), ""),
            waiting=lambda: (
                getattr(executor, "waiting", "") or schedule.without_cards(time.monotonic())
            ),
            asked_to_stop=lambda: stop_requests(store.path),
            write_status=lambda text: store.write_file(run_files.STATUS, redact(text, os.environ)),
            card_checks=CardChecks(store, time.time) if options.passports else None,
            stop=stop,
        ).drive()


#: Time that nodes may take to join a restarted head.
NODES_PATIENCE_S = 180.0


def cards_by_kind(nodes: Sequence[Node]) -> dict[str, int]:
    """Count the cards of each kind."""
    return dict(Counter(node.accelerator.value for node in nodes for _ in node.card_indices))


def with_its_nodes(
    jobs: Sequence[Job], options: RunOptions, session: Session, say: Say, run: Path
) -> Session:
    """Wait for the nodes that the cluster had before its head died: a plan without them would give
    up jobs for good. A run resumed by a user needs only a node of each kind of card it had; raises
    ClusterError if a kind does not come back. Kinds of which the grid has no job may stay away."""
    expected: Mapping[str, int] = {}
    if options.supervisor is not None and options.supervisor.restarted:
        expected = options.supervisor.cards
    elif options.resume:
        expected = dict.fromkeys(kinds_of(run), 1)
    kinds = {job.accelerator.value for job in jobs}
    expected = {kind: n for kind, n in expected.items() if kind in kinds}

    def missing(nodes: Sequence[Node]) -> str:
        there = cards_by_kind(nodes)
        few = {kind: n - there.get(kind, 0) for kind, n in expected.items()}
        words = [f"{n} {kind}" if n > 1 else kind for kind, n in few.items() if n > 0]
        return f"{', '.join(words)} cards that the cluster had before" if words else ""

    session = _wait(session, missing, NODES_PATIENCE_S, say)
    there = cards_by_kind(session.nodes)
    if session.look and (gone := [kind for kind in expected if kind not in there]):
        raise ClusterError(f"no node with {', '.join(gone)} has come back to the cluster")
    return session


def with_cards_for(jobs: Sequence[Job], patience_s: float, session: Session, say: Say) -> Session:
    """Wait for nodes that join late, until the cluster has cards for each job of the grid."""
    if not patience_s:
        return session
    wanted = dict.fromkeys((job.accelerator, job.cards) for job in jobs)

    def missing(nodes: Sequence[Node]) -> str:
        few = [f"{n} {kind}" for kind, n in wanted if not legal_card_sets(nodes, kind, n)]
        has = ", ".join(f"{n} {kind}" for kind, n in cards_by_kind(nodes).items()) or "none"
        return f"cards for jobs of {', '.join(few)}; the cluster has {has}" if few else ""

    return _wait(session, missing, patience_s, say)


def _wait(
    session: Session, missing: Callable[[Sequence[Node]], str], patience_s: float, say: Say
) -> Session:
    """Look at a cluster once a second until it has all nodes that are missing."""
    deadline, waiting = time.monotonic() + patience_s, False
    while session.look is not None and (what := missing(session.nodes)):
        if time.monotonic() > deadline:
            say(f"going on without {what}")
            break
        if not waiting:
            say(f"waiting up to {duration(patience_s)} for {what}")
            waiting = True
        time.sleep(1.0)
        session = replace(session, nodes=session.look())
    return session


_ELSEWHERE = "give the `results:` of its grid as --results DIR, or name the grid file"

_ANSWERED = {State.SUCCEEDED, State.OUT_OF_MEMORY, State.PRUNED, State.UNSUPPORTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Outcome of a run; ``states`` has every planned job, or none if it was cut short."""

    store: Store
    plan: Plan
    result: DriveResult
    states: Mapping[str, State]
    mirror: Mirror | None = None  # of the results at an address

    @property
    def answered(self) -> bool:
        """Return whether every job was measured, does not fit or is unsupported here, and at least
        one was measured."""
        states = set(self.states.values())
        return self.result.finished and State.SUCCEEDED in states and states <= _ANSWERED


def run_grid(
    source: Grid | str | os.PathLike[str], options: RunOptions, say: Say = lambda _: None
) -> RunOutcome:
    """Plan a grid or grid file and measure jobs without a result; ``say`` announces each step.

    Raises GridError if the grid is refused; ClusterError if there are no usable cards; StoreError
    if results cannot be read or written, or another driver holds the run.
    """
    grid = grid_of(source, options, elsewhere=start_of(options) == CLUSTER)
    options = with_results_of(grid, options)
    trackers = [tracker_of(text) for text in options.log_to]
    _check_models(grid, options.remote_code)
    refuse_without_key(grid, options.key_file)
    store = Store(options.results, options.name or grid.name)
    options.report(run=store.run, results=str(options.results.resolve()))
    if options.resume and (store.exists or not options.restarted):
        store = Store.existing(options.results, store.run).resume()
        options = with_cards_of(store.path, options)
    store.refuse_if_held()  # before contacting the cluster, which may be away
    change = None if options.restarted else change_of(grid, store.path)
    if not options.resume:
        refuse_anothers(grid, store.path, change)
    if change is not None:
        refuse_another(grid, change, store.run, {row.job_id for row in history_of(store)})
    with (
        loading.permitted(options.remote_code),
        encryption.key_named(options.key_file),
        _session(options, grid) as session,
    ):
        jobs = grid.jobs()
        session = with_its_nodes(jobs, options, session, say, store.path)
        session = with_cards_for(jobs, options.wait_for_cards, session, say)
        session = replace(session, nodes=session.described(session.nodes))
        options.report(address=session.address, cards=cards_by_kind(session.nodes))
        history = history_of(store)
        plan = plan_run(options, grid, session, store, history)  # refused here, nothing is created
        if start_of(options) == CLUSTER and not options.restarted:
            refuse_files(session.nodes, grid, running(plan))
        with store, owner_of(store).marks_this_process():
            if not options.resume:  # another's may have begun meanwhile
                refuse_anothers(grid, store.path, change)
            options.report(drives=True)
            if session.address:
                serve_results(options.results)
            if not options.restarted:
                remove_stop_requests(store.path)  # those for drivers that have ended
            write = partial(
                with_room, say=say, give_up=lambda: not may_wait_for_room(options, store)
            )
            recover_outcomes(session, store, plan, say, write)
            if (now := history_of(store)) != history:
                # Another driver may just have finished the run, or left attempts without rows.
                history, plan = now, plan_run(options, grid, session, store, now)
            deadline = None
            if options.ends_at is not None:
                deadline = Deadline.of(options.ends_at, now=time.time(), jobs=len(plan.jobs))
            _announce(session, plan, store, history, deadline, say)
            for line in change.lines() if change is not None else ():
                say(line)
            clear_up(store, say)
            mirror = _mirror(options, store, say)
            logs = [RowLog(store, *tracker) for tracker in trackers]
            seed = seed_of(store.path)
            kept = kept_options(options, seed, cards_by_kind(session.nodes))
            write(lambda: store.write_file(run_files.GRID, grid.text))
            if grid.commits:
                commits = json.dumps(grid.commits, indent=1)
                write(lambda: store.write_file(run_files.REVISIONS, commits))
            write(lambda: store.write_file(run_files.OPTIONS, kept))
            with contextlib.closing(mirror) if mirror else contextlib.nullcontext():
                for log in logs:
                    log.start()
                hurry = True
                order = order_of(grid, plan, store, seed)
                try:
                    result = drive(
                        *(options, session, plan, store, history, deadline, seed, say),
                        mirror=mirror,
                        logs=logs,
                        order=order,
                    )
                    hurry = deadline is not None or not result.finished
                finally:
                    for line in close_all(logs, hurry=hurry):
                        say(line)
            remove_stop_requests(store.path)
            _predict(plan, grid, store, say)
            states = final_states(plan, store.history()) if result.finished else {}
            if order is not None:
                for line in write_files(with_files(order.answers(), plan), plan, store):
                    say(line)
                if grid.search is not None:
                    say(f"search: {order.text()}")
                if order.ended:  # what it left out has its answer, too
                    states = {
                        job_id: state
                        for job_id, state in states.items()
                        if state is not State.NOT_STARTED or not order.left_out(job_id)
                    }
    return RunOutcome(store=store, plan=plan, result=result, states=states, mirror=mirror)


def may_wait_for_room(options: RunOptions, store: Store) -> bool:
    """Return whether a driver may wait for room before its loop: one that was started again, until
    its deadline or a request to stop. A user's command is refused at once."""
    over = options.ends_at is not None and time.time() >= options.ends_at
    return options.restarted and not over and not stop_requests(store.path)[0]


def _predict(plan: Plan, grid: Grid, store: Store, say: Say) -> None:
    """Write predictions of the cells that a searched or stopped run left unmeasured."""
    states = final_states(plan, store.history()).values()
    left = sum(state in (State.NOT_STARTED, State.LOST) for state in states)
    predictions = []
    if State.SUCCEEDED in states and left > 0 and len(plan.jobs) <= MOST_CELLS:
        try:
            predictions = predictions_of(plan, grid.search, store)
        except (ValueError, ArithmeticError, MemoryError) as error:  # the rows are what matters
            say(f"nothing is predicted: {error}")
    if predictions or os.path.exists(store.path / run_files.PREDICTIONS):
        path = store.write_file(run_files.PREDICTIONS, table_of(Prediction, predictions))
        cells = len({one.job_id for one in predictions})
        say(f"predicted: {cells} unmeasured cells, {path.name}")


def grid_to_resume(options: RunOptions) -> tuple[Path, str]:
    """Grid file and name of the run to resume, by default the newest; raises StoreError if there
    is no such run."""
    known = runs(options.results)
    if options.name is None and not known:
        raise StoreError(f"no run to resume in {options.results}; {_ELSEWHERE}")
    try:
        store = Store.existing(options.results, options.name or known[0])
    except StoreError as error:
        raise StoreError(f"{error} To resume one that lies elsewhere, {_ELSEWHERE}") from None
    grid = store.path / run_files.GRID
    if not os.path.isfile(grid):
        raise StoreError(f"run {store.run!r} has no {grid.name}; name the grid file to resume it")
    return grid, store.run


def _check_models(grid: Grid, named: Sequence[str]) -> None:
    """Refuse ``--remote-code`` for models that the grid does not have: probably a typo."""
    known = {job.model for job in grid.jobs()} if named else set()
    models = sorted(known | {split(model)[0] for model in known})
    hint = f"the models are: {', '.join(models)}"
    problems = [
        Problem(file=grid.file, message=f"--remote-code {name}: no job has this model", hint=hint)
        for name in named
        if name not in models
    ]
    if problems:
        raise GridError(problems)


def _session(options: RunOptions, grid: Grid) -> contextlib.AbstractContextManager[Session]:
    kinds = grid.accelerators()
    if options.emulate is not None and (options.address or options.in_process):
        raise OptionError("--emulate cannot be combined with --address or --in-process")
    cluster = options.address or os.environ.get("RAY_ADDRESS")
    local = options.in_process or options.emulate is not None or not cluster
    if local and (problem := home_problem()):
        raise OptionError(f"{problem}; {HOME_REMEDY}")
    if options.in_process:
        return sessions.in_process_session(kinds, options.card_memory_bytes)
    if options.emulate is not None:
        return sessions.emulated_session(options.emulate, kinds, options.card_memory_bytes)
    if not cluster:
        return sessions.own_session(kinds)
    link = options.supervisor
    place = QueueOptions(
        priority=options.priority,
        since=link.began if link is not None else time.time(),
        supervised=link is not None,
    )
    return sessions.cluster_session(options.address, kinds, place)


def _announce(
    session: Session,
    plan: Plan,
    store: Store,
    history: Sequence[PastRow],
    deadline: Deadline | None,
    say: Say,
) -> None:
    say(f"Run {store.run}: grid {plan.grid_name}, {len(plan.jobs)} jobs")
    say(f"cards: {nodes_text(plan.nodes)}")
    for line in summary_lines(plan):
        say(line)
    if deadline is not None:
        for line in deadline_lines(deadline, forecast_of(plan, history, deadline)):
            say(line)
    passing = " (the working directory of a Ray job is thrown away)" if inside_ray_job() else ""
    say(f"rows: {store.tables_path.resolve()}{passing}")


def _mirror(options: RunOptions, store: Store, say: Say) -> Mirror | None:
    """Start mirroring the results to an address; raises StoreError if it is not writable or has
    another run of this name."""
    if not options.results_address:
        return None
    mirror = Mirror(store.path, options.results_address, store.run_id, again=options.restarted)
    say(f"a copy of the rows goes to {mirror.address}")
    mirror.start()
    return mirror
