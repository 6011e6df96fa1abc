"""Jobs as Ray tasks that hold their cards.

A job that has been running for a second is a task in its node's placement group, with as many cards
as it has there: `ray list tasks`, `ray status` and the dashboard show which job has which cards.
The task returns when the job's worker has ended the attempt; cancelling it ends the job. Orders and
outcomes do not pass through tasks, so one that dies otherwise costs nothing and is replaced.
"""

from __future__ import annotations

from concurrent import futures
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workloads.devices import DeviceSpec

_LOOK_S = 1.0


def hold_cards(
    resource: str, agent: Any = None, worker_id: str = "", attempt_id: str = ""
) -> tuple[str, ...]:
    """Body of every task: wait until the agent's worker has ended the attempt; without an agent,
    only return the indices of the task's cards. (Its module must import little: it is imported by
    a process for each card.)"""
    import ray

    if agent is not None:
        quiet = {"concurrency_group": "jobs", "enable_task_events": False}
        ended = agent.job.options(**quiet).remote(worker_id, attempt_id).future()
        # In `ray.get` a task would lend its CPUs to others. Python acts on a cancellation between
        # two waits.
        while not futures.wait([ended], timeout=_LOOK_S).done:
            pass
        ended.result()
    ids = ray.get_runtime_context().get_accelerator_ids()
    return tuple(map(str, ids.get(resource, ())))


@cache
def _task() -> Any:
    """One function for both uses: it is in the GCS before the first job runs, so that a job can be
    shown while the GCS is silent. By default Ray ends the process of a task with GPUs after it."""
    import ray

    return ray.remote(num_cpus=0, max_retries=0, max_calls=0)(hold_cards)


def task_on_cards(group: Any, spec: DeviceSpec, cards: int, name: str, *arguments: Any) -> Any:
    """Start a task that holds so many cards of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    task = _task().options(
        name=name,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        **spec.ray_request(cards),
    )
    return task.remote(spec.ray_resource, *arguments)
