"""The simulator on so many jobs and nodes: simulate_night.py JOBS NODES."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.contender import serve
from benchmarks.scheduling import CARDS, NOISE, shape
from orchestrator.core.job import Accelerator, Job
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.simulator import SimulationSettings, simulate

LOAD_S = 20.0


class Known:
    """The expectations of each job, by its number."""

    def estimate(self, job: Job) -> Estimate:
        return Estimate(load_s=LOAD_S, run_s=shape(int(job.dataset))[2], margin=2.0)


def main() -> None:
    count, node_count = int(sys.argv[1]), int(sys.argv[2])

    def turn() -> dict[str, Any]:
        result = simulate(
            [PlannedJob(job=job_of(number), action=Action.RUN) for number in range(count)],
            [node_of(f"n{number}") for number in range(node_count)],
            Known(),
            settings=SimulationSettings(noise=NOISE),
        )
        return {
            "work": count,
            "makespan_s": result.makespan_s,
            "bound_s": result.bound_s,
            "work_bound_s": result.work_bound_s,
            "events": result.events,
        }

    serve(turn)


def job_of(number: int) -> Job:
    """A job of the night."""
    cards, model, _ = shape(number)
    return Job(
        experiment="night",
        workload="text-generation",
        model=f"m{model}",
        dataset=str(number),
        accelerator=Accelerator.HPU,
        cards=cards,
        precision="bf16",
        batch_size=1,
    )


def node_of(name: str) -> Node:
    """A server of the night."""
    return Node(
        node_id=name,
        name=name,
        accelerator=Accelerator.HPU,
        card_indices=tuple(range(CARDS)),
        device_name="Gaudi2",
    )


if __name__ == "__main__":
    main()
