"""No-op jobs through schedule, driver, store and Ray: JOBS NODES CARDS SCRATCH."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.contender import serve
from orchestrator.cluster import parse_emulation
from orchestrator.derive import measurement_of
from orchestrator.driver import Driver
from orchestrator.events import RecordRow
from orchestrator.job import Accelerator, Job, State
from orchestrator.live import QuietView
from orchestrator.measurement import Measurement
from orchestrator.on_ray.cluster import emulate
from orchestrator.on_ray.executor import RayExecutor
from orchestrator.plan import Action, Plan, PlannedJob
from orchestrator.planning import estimator_for
from orchestrator.results.store import Store
from orchestrator.run_status import Board
from orchestrator.scheduling.schedule import Schedule, ScheduleSettings
from orchestrator.session import with_memory
from orchestrator.watchdog import Watchdog


def main() -> None:
    count, node_count, cards = map(int, sys.argv[1:4])
    scratch = Path(sys.argv[4])
    nodes = with_memory(parse_emulation(f"{node_count}x{cards}", [Accelerator.HPU]))
    jobs = tuple(PlannedJob(job=_job(number), action=Action.RUN) for number in range(count))
    plan = Plan(grid_name="noop", jobs=jobs, nodes=nodes)

    def turn() -> dict[str, Any]:
        results = Path(tempfile.mkdtemp(dir=scratch))
        unwell: list[str] = []  # what became of jobs that did not succeed
        ended: list[tuple[float, str]] = []  # of each job: when its row was made, and by whom

        def to_measurement(record: RecordRow) -> Measurement:
            if record.state is not State.SUCCEEDED:
                unwell.append(f"{record.state}: {record.reason}")
            elif record.final and record.outcome is not None:
                worker = record.outcome.ranks[0].worker
                ended.append((time.perf_counter(), worker.worker_id if worker else ""))
            return measurement_of(
                record,
                run="noop",
                invocation_id="noop",
                recorded_at=time.time(),
                nodes=board.nodes or nodes,
            )

        began, cpu = time.perf_counter(), time.process_time()
        with Store.open(results, "noop") as store, contextlib.ExitStack() as stack:
            executor = stack.enter_context(
                contextlib.closing(
                    RayExecutor(
                        run="noop",
                        log_dir=store.path / "logs",
                        factory="benchmarks.contenders.noop_worker:NoopWorker",
                        preload=False,
                    )
                )
            )
            board = Board(run="noop", plan=plan, started_at=time.time())
            Driver(
                schedule=Schedule(jobs, ScheduleSettings(), estimator_for([], nodes)),
                executor=executor,
                store=store,
                to_measurement=to_measurement,
                board=board,
                view=QuietView(),
                write_status=lambda text: store.write_file("status.json", text),
                watchdog=Watchdog(),
            ).drive()
            done = time.perf_counter()
            used = time.process_time() - cpu
        if len(ended) != count:
            raise RuntimeError(f"{len(ended)} of {count} jobs succeeded; {unwell[:3]}")
        seen: set[str] = set()
        warm = 0  # jobs until every card had done one
        for number, (_, worker) in enumerate(ended, start=1):
            if worker not in seen:
                seen.add(worker)
                warm = number
        # Where the jobs run out before the last worker is up, the second half has to do.
        warm = min(warm, len(ended) // 2)
        return {
            "work": len(ended) - warm,
            "wall_s": ended[-1][0] - ended[warm - 1][0],
            "whole_s": done - began,
            "driver_cpu_ms": used / len(ended) * 1e3,
            "workers": len(seen),
        }

    with emulate(nodes):
        serve(turn)


def _job(number: int) -> Job:
    return Job(
        experiment="noop",
        workload="text-generation",
        model="nothing",
        dataset=str(number),
        accelerator=Accelerator.HPU,
        cards=1,
        precision="fp32",
        batch_size=1,
    )


if __name__ == "__main__":
    main()
