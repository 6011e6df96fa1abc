"""Gangs against a load of one-card jobs on two emulated servers: `python two_servers.py DIR`.

The gangs need a short job first, so that every card is busy and a backlog waits when they may run.
Printed as JSON, last line: for each attempt its width, node, cards, begin and end; and how the jobs
ended. A process of its own, since one process can be on one Ray cluster only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from core_cases import a_job

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, Job
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import Action, Plan, PlannedJob
from orchestrator.driver.board import Board
from orchestrator.driver.loop import Driver
from orchestrator.on_ray.executor import RayExecutor
from orchestrator.on_ray.local_cluster import emulate
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.store.store import Store
from orchestrator.watch.live import QuietView

#: As long as each other: longer jobs may go before wider ones while little else is left.
SINGLES, SINGLE_S, GANG_S = 60, 1.0, 1.0
WIDTHS = (8, 4, 2)


class Known:
    """The estimates: jobs take what they are told to sleep."""

    def estimate(self, job: Job) -> Estimate:
        return Estimate(load_s=0.1, run_s=float(job.model.partition(":")[2]))


def sleeper(name: str, seconds: float, cards: int = 1) -> Job:
    return a_job(model=f"sleep:{seconds}", dataset=name, cards=cards)


def main() -> dict[str, Any]:
    from ray_bench import emulated_node

    first = sleeper("first", SINGLE_S)  # of equal jobs, the first of the plan goes first
    jobs = [PlannedJob(job=first, action=Action.RUN)]
    jobs += [
        PlannedJob(job=sleeper(f"single {number}", SINGLE_S), action=Action.RUN)
        for number in range(SINGLES)
    ]
    jobs += [
        PlannedJob(job=sleeper("gang", GANG_S, cards), action=Action.RUN, needs=(first.job_id,))
        for cards in WIDTHS
    ]
    nodes = [
        emulated_node(f"hpu-{number}", Accelerator.HPU, tuple(range(8)), 8) for number in (1, 2)
    ]
    home = Path(sys.argv[1])
    with emulate(nodes), Store.open(home, "night") as store:
        executor = RayExecutor(
            run="two-servers",
            factory="fake_workers:FakeWorker",
            preload=(),
            log_dir=home / "logs",
        )

        def row(record: RecordRow) -> Measurement:
            return measurement_of(
                record, run="night", invocation_id="i", recorded_at=0.0, nodes=nodes
            )

        driver = Driver(
            schedule=Schedule(jobs, ScheduleSettings(), Known()),
            executor=executor,
            store=store,
            to_measurement=row,
            board=Board(
                run="r",
                plan=Plan(grid_name="g", jobs=tuple(jobs), nodes=tuple(nodes)),
                started_at=0.0,
            ),
            view=QuietView(),
        )
        finished = driver.drive().finished
        executor.close()
        rows = store.measurements()
    return {
        "finished": finished,
        "jobs": len(jobs),
        "ends": [
            row.reason if row.state != "SUCCEEDED" else "SUCCEEDED" for row in rows if row.final
        ],
        "attempts": [
            {
                "width": row.cards,
                "gang": row.dataset == "gang",
                "nodes": list(row.nodes),
                "cards": list(row.card_indices),
                "began": row.started_at,
                "ended": row.ended_at,
            }
            for row in rows
        ],
    }


if __name__ == "__main__":
    found = main()
    sys.stdout.flush()
    print("\n" + json.dumps(found))
