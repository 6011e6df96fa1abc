"""No-op jobs through schedule, driver, store and Ray: JOBS NODES CARDS SCRATCH.

The workers are the product's own on emulated cards, which put their process in order for a workload
that does nothing.

The workers start one after the other over many seconds, and so do their first jobs. So that all
jobs meet warm workers, as in a pool, the driver hears of the first that is up when the last is,
and of the first job that has ended when the last of those has. They come before what is timed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from benchmarks.contender import serve
from benchmarks.contenders.noop_workload import offer_workload
from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import AttemptEnded, Event, RecordRow, WorkerReady
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import Action, Plan, PlannedJob
from orchestrator.core.topology import parse_emulation
from orchestrator.driver.board import Board
from orchestrator.driver.loop import Driver
from orchestrator.driver.session import with_memory
from orchestrator.on_ray.executor import RayExecutor
from orchestrator.on_ray.local_cluster import emulate
from orchestrator.planning.planner import estimator_for
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.store.store import Store
from orchestrator.watch.live import View


class Together:
    """An executor whose workers are all ready at once, and whose first jobs all end at once: a
    worker's first job takes longer than all others. Then the clock starts, before anybody hears of
    these ends and decides about the next jobs."""

    def __init__(self, executor: RayExecutor, workers: int, begin: Callable[[], None]) -> None:
        self._executor, self._workers, self._begin = executor, workers, begin
        self._held: list[Event] = []
        self._kinds: list[type] = [WorkerReady, AttemptEnded]

    def events(self, timeout_s: float) -> list[Event]:
        """Events since the last call; of the first kind that is left nothing before there is one
        for each worker."""
        happened = self._executor.events(timeout_s)
        if not self._kinds:
            return happened
        self._held += [event for event in happened if isinstance(event, self._kinds[0])]
        told = [event for event in happened if not isinstance(event, self._kinds[0])]
        if len(self._held) == self._workers:
            told += self._held
            self._held = []
            del self._kinds[0]
            if not self._kinds:
                self._begin()
        return told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class Timed:
    """A store that knows when rows were safe, and when the clock was started."""

    def __init__(self, store: Store, workers: int) -> None:
        self._store, self._workers = store, workers
        self.rows = self.files = 0
        self.warm: tuple[float, float, int, int] | None = None
        self.last = (0.0, 0.0, 0, 0)  # wall, CPU, rows, files

    def append(self, *measurements: Measurement) -> None:
        """Write rows."""
        self._store.append(*measurements)
        self.rows += len(measurements)
        self.files += 1
        self.last = (perf_counter(), process_time(), self.rows, self.files)

    def start_clock(self) -> None:
        """Start the clock. The rows of the first jobs, which count for nothing, are yet to come."""
        self.warm = (perf_counter(), process_time(), self._workers, self.files)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def main() -> None:
    count, node_count, cards = map(int, sys.argv[1:4])
    scratch = Path(sys.argv[4])
    os.environ["PYTHONPATH"] = offer_workload(scratch)
    sys.path.insert(0, str(scratch))
    nodes = with_memory(parse_emulation(f"{node_count}x{cards}", [Accelerator.HPU]))
    workers = node_count * cards
    jobs = tuple(
        PlannedJob(job=_job(number), action=Action.RUN) for number in range(workers + count)
    )
    plan = Plan(grid_name="noop", jobs=jobs, nodes=nodes)

    def turn() -> dict[str, Any]:
        results = Path(tempfile.mkdtemp(dir=scratch))
        rows: Counter[State] = Counter()
        unwell: list[str] = []  # what became of jobs that did not succeed

        def to_measurement(record: RecordRow) -> Measurement:
            if record.reason and record.state is not State.SUCCEEDED:
                unwell.append(f"{record.state}: {record.reason}")
            return measurement_of(
                record,
                run="noop",
                invocation_id="noop",
                recorded_at=time.time(),
                nodes=board.nodes or nodes,
            )

        with Store(results, "noop") as store, contextlib.ExitStack() as stack:
            ray = RayExecutor(run="noop", log_dir=store.path / "logs")
            timed = Timed(store, workers)
            closing = stack.enter_context(contextlib.closing(ray))
            executor = Together(closing, workers, timed.start_clock)
            board = Board(run="noop", plan=plan, started_at=time.monotonic())
            Driver(
                schedule=Schedule(jobs, ScheduleSettings(), estimator_for([], nodes)),
                executor=executor,
                store=timed,
                to_measurement=to_measurement,
                board=board,
                view=View(),
                write_status=lambda text: store.write_file("status.json", text),
            ).drive()
        rows.update(row.state for row in store.history() if row.final)
        if rows != {State.SUCCEEDED: len(jobs)} or timed.warm is None:
            raise RuntimeError(f"of {len(jobs)} jobs: {dict(rows)}; {unwell[:3]}")
        wall_s, cpu_s, work, files = (
            last - first for last, first in zip(timed.last, timed.warm, strict=True)
        )
        if not files:
            raise RuntimeError(f"{len(jobs)} jobs ended with the first rows: too few to time")
        return {
            "work": work,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "rows_per_file": work / files,
        }

    with emulate(nodes):
        serve(turn)


def _job(number: int) -> Job:
    return Job(
        experiment="noop",
        workload="noop",
        model="nothing",
        dataset=str(number),
        accelerator=Accelerator.HPU,
        cards=1,
        precision="fp32",
        batch_size=1,
    )


if __name__ == "__main__":
    main()
