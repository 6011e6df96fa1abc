"""``nightgrid run FILE``: plan, measure, report.

Everything that can be refused is refused before anything starts. Started again, a run measures
only what has no terminal row yet. Rows are safe as soon as they are announced.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.plan import add_grid_arguments, planned_nodes

if TYPE_CHECKING:
    from orchestrator.driver import DriveResult
    from orchestrator.grid.model import Grid
    from orchestrator.history import PastRow
    from orchestrator.job import State
    from orchestrator.plan import Plan
    from orchestrator.results.store import Store
    from orchestrator.session import Session

#: Some job FAILED, was TIMED_OUT, LOST or NOT_STARTED.
EXIT_JOBS_FAILED = 10
EXIT_INTERRUPTED = 130

EPILOG = """\
exit codes:
  0    every job succeeded, or is known not to fit or not to exist here
       (SUCCEEDED, OUT_OF_MEMORY, PRUNED, UNSUPPORTED)
  10   some job FAILED, TIMED_OUT, was LOST or NOT_STARTED; the report names them
  2    the grid file is refused;  3  no usable cluster;  4  results cannot be read or written
  130  ended at once by a third signal; run the same command again to go on

The first Ctrl-C (or SIGTERM) lets running jobs end and starts no more, a second stops them too;
every job still gets its row. A third ends at once.
Where results go: --results, else $NIGHTGRID_RESULTS, else ./results; inside a Ray job, whose
working directory is thrown away, ~/nightgrid-results on the node that drives the run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid run`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_grid_arguments(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the Ray cluster to run on (default: RAY_ADDRESS, or the job's own cluster)",
    )
    where.add_argument(
        "--in-process",
        action="store_true",
        help="one job at a time in this very process, without Ray: for debuggers",
    )
    parser.add_argument(
        "--card-memory",
        metavar="GIB",
        type=_gibibytes,
        dest="card_memory_bytes",
        help="memory of each emulated card (default: its share of this machine's)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only the report")


def run(args: argparse.Namespace) -> int:
    """Plan, measure and report; the exit code says how the jobs ended."""
    from orchestrator.grid.model import load_grid
    from orchestrator.results.store import Store

    # With emulated cards known, card counts are refused together with all else in the file.
    nodes_for = partial(planned_nodes, emulate=args.emulate) if args.emulate else None
    grid = load_grid(args.grid, nodes_for=nodes_for)
    store = Store.open(args.results, args.run_name or grid.name)
    with _session(args, grid) as session:
        _plan(args, grid, session, store)  # refused here, nothing is created
        with store:
            # Once more under the lock: another driver may just have finished the same run.
            plan = _plan(args, grid, session, store)
            _announce(args, session, plan, store)
            store.write_file("grid.yaml", Path(args.grid).read_bytes())
            result = _drive(args, session, plan, store)
            if not result.finished:
                _say(f"Interrupted ({result.reason}). The same command goes on from here.")
                return EXIT_INTERRUPTED
            states = final_states(plan, store.history())
    _report(store)
    return exit_code(states)


# ---------------------------------------------------------------- before


def _session(args: argparse.Namespace, grid: Grid) -> contextlib.AbstractContextManager[Session]:
    from orchestrator import session
    from orchestrator.errors import ClusterError

    kinds = grid.accelerators()
    if args.emulate is not None and (args.address or args.in_process):
        raise ClusterError("--emulate cannot be combined with --address or --in-process")
    if args.in_process:
        return session.in_process_session(kinds)
    if args.emulate is not None:
        return session.emulated_session(args.emulate, kinds, args.card_memory_bytes)
    return session.cluster_session(args.address, kinds)


def _plan(args: argparse.Namespace, grid: Grid, session: Session, store: Store) -> Plan:
    from orchestrator.planning import make_plan

    return make_plan(
        grid, session.nodes, _history(store), retry_failed=args.retry_failed, force=args.force
    )


def _history(store: Store) -> list[PastRow]:
    return store.history() if store.exists else []


def _announce(args: argparse.Namespace, session: Session, plan: Plan, store: Store) -> None:
    """Say what will happen and where rows will lie, before it happens."""
    from orchestrator.plan_text import nodes_text, summary_lines
    from orchestrator.results.directory import inside_ray_job

    _say(f"Run {store.run}: grid {plan.grid_name}, {len(plan.jobs)} jobs")
    _say(f"cards: {nodes_text(plan.nodes)}")
    for line in summary_lines(plan):
        _say(line)
    passing = " (the working directory of a Ray job is thrown away)" if inside_ray_job() else ""
    _say(f"rows: {store.tables_path.resolve()}{passing}")
    if store.taken_over_from is not None:
        _say(f"taken over from a driver that died: {store.taken_over_from}")


# ---------------------------------------------------------------- while


def _drive(args: argparse.Namespace, session: Session, plan: Plan, store: Store) -> DriveResult:
    """Run the plan on the session's executor, which is started only if anything is to run."""
    from orchestrator.derive import measurement_of
    from orchestrator.driver import Driver, StopSignal
    from orchestrator.environment import provenance
    from orchestrator.events import RecordRow
    from orchestrator.in_process_executor import InProcessExecutor
    from orchestrator.live import open_view
    from orchestrator.measurement import Measurement
    from orchestrator.plan import Action
    from orchestrator.planning import estimator_for
    from orchestrator.run_status import Board
    from orchestrator.scheduling.schedule import Schedule, ScheduleSettings
    from orchestrator.watchdog import Watchdog

    invocation_id = uuid.uuid4().hex[:12]
    origin = provenance()
    board = Board(run=store.run, plan=plan, started_at=time.time())

    def to_measurement(record: RecordRow) -> Measurement:
        return measurement_of(
            record,
            run=store.run,
            invocation_id=invocation_id,
            recorded_at=time.time(),
            provenance=origin,
            nodes=board.nodes or plan.nodes,
        )

    # Signals are ours once the executor is open (Ray sets handlers of its own) and stay so until
    # it is closed: an impatient Ctrl-C must not leave processes behind.
    with contextlib.ExitStack() as signals, contextlib.ExitStack() as stack:
        if any(planned.action is Action.RUN for planned in plan.jobs):
            _say(f"starting on {session.description} …")
            executor = stack.enter_context(session.executor(store.run, store.path / "logs"))
        else:
            executor = stack.enter_context(contextlib.closing(InProcessExecutor([])))
        stop = signals.enter_context(StopSignal().on_signals())
        view = stack.enter_context(contextlib.closing(open_view(quiet=args.quiet)))
        history = _history(store)
        schedule = Schedule(
            plan.jobs,
            ScheduleSettings(),
            estimator_for(history, plan.nodes),
            attempts_before=attempts_before(history),
        )
        return Driver(
            schedule=schedule,
            executor=executor,
            store=store,
            to_measurement=to_measurement,
            board=board,
            view=view,
            write_status=lambda text: store.write_file("status.json", text),
            # Of this very process it could end only all.
            watchdog=None if args.in_process else Watchdog(),
            stop=stop,
        ).drive()


# ---------------------------------------------------------------- after


def _report(store: Store) -> None:
    """Tables, the page, and where everything is."""
    from rich.console import Console

    from orchestrator.report import read_summary, write_page
    from orchestrator.report.terminal import print_summary

    summary, measurements = read_summary(store)
    print_summary(summary, Console(file=sys.stdout))
    page = write_page(store, summary, measurements)
    _say("")
    _say(f"page: {page.resolve()}")
    _say(f"rows: {store.tables_path.resolve()}")


def attempts_before(history: Sequence[PastRow]) -> dict[str, int]:
    """The number of the last attempt at each job that has rows: the next one goes on from it."""
    numbers: dict[str, int] = {}
    for row in history:
        numbers[row.job_id] = max(row.attempt_number, numbers.get(row.job_id, 0))
    return numbers


def final_states(plan: Plan, history: Sequence[PastRow]) -> dict[str, State]:
    """How each job of the plan stands: the state of its newest final row on the same footing."""
    from orchestrator.job import Accelerator, State

    # A kind of card that is not there is not emulated either: its rows say so.
    emulated = dict.fromkeys(Accelerator, False)
    emulated |= {node.accelerator: node.emulated for node in plan.nodes}
    newest = {(row.job_id, row.emulated): row.state for row in history if row.final}
    states = {}
    for planned in plan.jobs:
        job = planned.job
        key = (job.job_id, emulated[job.accelerator])
        states[job.job_id] = newest.get(key, State.NOT_STARTED)
    return states


def exit_code(states: dict[str, State]) -> int:
    """0 when every job has an answer, 10 when some has none that will do."""
    from orchestrator.job import State

    answered = {State.SUCCEEDED, State.OUT_OF_MEMORY, State.PRUNED, State.UNSUPPORTED}
    return 0 if all(state in answered for state in states.values()) else EXIT_JOBS_FAILED


def _gibibytes(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 2**20:
        raise argparse.ArgumentTypeError(f"{text!r} is no size in GiB, such as 2 or 0.5")
    return round(size * 2**30)


def _say(text: str) -> None:
    print(text, flush=True)
