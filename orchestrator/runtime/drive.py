"""The driver of a run, put together: board, schedule, executor and store, until the last row."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.domain.job import State
from orchestrator.results import paths
from orchestrator.runtime.earlier import attempts_before, cards_before
from orchestrator.runtime.grid_plan import history_of, start_of
from orchestrator.runtime.options import RunOptions

if TYPE_CHECKING:
    from orchestrator.domain.deadline import Deadline
    from orchestrator.planning.plan import Plan
    from orchestrator.results.mirror import Mirror
    from orchestrator.results.store import Store
    from orchestrator.runtime.driver import DriveResult
    from orchestrator.runtime.row_log import RowLog
    from orchestrator.runtime.session import Session
    from orchestrator.runtime.status import RunStatus


_LOG = logging.getLogger("nightgrid.drive")


class AtLeisure:
    """A task for the time in which only the last jobs run: earlier it would take a core that timed
    jobs may be measured on. It is started once, in a thread."""

    def __init__(self, task: Callable[[], None] | None) -> None:
        self._task = task
        self.thread: threading.Thread | None = None

    def saw(self, status: RunStatus) -> None:
        """Start the task if the run has a result, and no job is left to start."""
        if self._task is None or self.thread or status.to_start > 0:
            return
        if status.counts.get(State.SUCCEEDED):
            self.thread = threading.Thread(target=self._run, args=(self._task,), daemon=True)
            self.thread.start()

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # whoever needs it does it again, and says what is wrong
            _LOG.debug("a task beside the last jobs failed", exc_info=True)


def drive(
    options: RunOptions,
    session: Session,
    plan: Plan,
    store: Store,
    deadline: Deadline | None,
    seed: int,
    say: Callable[[str], None],
    mirror: Mirror | None = None,
    logs: Sequence[RowLog] = (),
) -> DriveResult:
    """Run the plan on the session's executor, which is started only if anything is to run."""
    from orchestrator.domain.events import RecordRow
    from orchestrator.domain.measurement import Measurement
    from orchestrator.host.environment import provenance
    from orchestrator.planning.plan import Action
    from orchestrator.planning.planner import estimator_for
    from orchestrator.results.derive import measurement_of
    from orchestrator.results.notes import Notes
    from orchestrator.results.stop_file import requested
    from orchestrator.runtime.board import Board
    from orchestrator.runtime.clean_output import CleanView, clean_row
    from orchestrator.runtime.driver import Driver
    from orchestrator.runtime.in_process import InProcessExecutor
    from orchestrator.runtime.passports import PassportBook
    from orchestrator.runtime.row_writer import row_thread
    from orchestrator.runtime.stop_signal import StopSignal
    from orchestrator.runtime.watchdog import Watchdog
    from orchestrator.scheduling.schedule import Schedule, ScheduleSettings
    from orchestrator.watching.live import open_view
    from orchestrator.worker.leftovers import Owner
    from orchestrator.worker.redaction import redact

    owner = Owner.of_this_process()
    assert owner is not None
    origin = provenance()
    board = Board(
        run=store.run,
        plan=plan,
        started_at=time.monotonic() - options.under_way_s(),
        start=start_of(options),
    )

    def to_measurement(record: RecordRow) -> Measurement:
        row = measurement_of(
            record,
            run=store.run,
            invocation_id=owner.invocation_id,
            recorded_at=time.time(),
            provenance=origin,
            nodes=board.nodes or plan.nodes,
        )
        return clean_row(row)

    at_leisure = AtLeisure(options.while_last_jobs_run)

    def publish(status: RunStatus) -> None:
        if status.counts.get(State.SUCCEEDED):
            options.tell(succeeded=True)  # should this driver die, the next one's breaker rests
        at_leisure.saw(status)
        session.publish(status)

    # Signals are ours once the executor is open (Ray sets handlers of its own) and stay so until
    # it is closed: an impatient Ctrl-C must not leave processes behind.
    with contextlib.ExitStack() as signals, contextlib.ExitStack() as stack:
        if any(planned.action is Action.RUN for planned in plan.jobs):
            say(f"starting on {session.description} …")
            opening = session.executor(
                store.run, store.path / paths.LOGS, plan.host_packages, board.label
            )
            executor = stack.enter_context(opening)
        else:
            executor = stack.enter_context(contextlib.closing(InProcessExecutor([])))
        stop = signals.enter_context(StopSignal().on_signals())
        view = stack.enter_context(contextlib.closing(open_view(quiet=options.quiet)))
        outer = (executor, mirror, *logs)  # they may be in trouble while work goes on
        history = history_of(store)
        settings = ScheduleSettings(
            seed=seed,
            passports=options.passports,
            succeeded_before=options.charge is not None and options.charge.succeeded,
        )
        if deadline is not None:
            until, stop_s = deadline.work_until, deadline.stop_s
            settings = replace(
                settings, work_until=until, stop_s=stop_s, follow_clock=not options.budget
            )
        schedule = Schedule(
            plan.jobs,
            settings,
            estimator_for(history, plan.nodes),
            attempts_before=attempts_before(
                history, store.attempts_set_aside(planned.job.job_id for planned in plan.jobs)
            ),
            cards_before=cards_before(plan, store),
        )
        return Driver(
            schedule=schedule,
            executor=executor,
            store=store,
            to_measurement=to_measurement,
            notes=Notes(run=store.run, invocation_id=owner.invocation_id, provenance=origin),
            board=board,
            view=CleanView(view),
            publish=publish,
            logged=lambda row: [log.take(row) for log in logs],
            trouble=lambda: next(filter(None, map(trouble_of, outer)), ""),
            waiting=lambda: getattr(executor, "waiting", ""),
            asked_to_stop=lambda: requested(store.path),
            write_status=lambda text: store.write_file(paths.STATUS, redact(text, os.environ)),
            # Where jobs run in this process, the thread would run beside what is timed.
            row_thread=None if options.in_process else stack.enter_context(row_thread()),
            passports=PassportBook(store, time.time) if options.passports else None,
            # In this very process a watchdog could end nothing but the whole run.
            watchdog=None if options.in_process else Watchdog(),
            stop=stop,
        ).drive()


def trouble_of(edge: object) -> str:
    """The trouble of an executor, a mirror or a log, while work goes on; "" for none."""
    told: str = getattr(edge, "trouble", "")
    return told
