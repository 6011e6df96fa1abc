"""An executor under test, with every event it has reported."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from core_cases import a_job
from patience import patience

from orchestrator.core.events import (
    AttemptEnded,
    Event,
    NodeJoined,
    RunAttempt,
    StartWorker,
    StopWorker,
    WorkerReady,
    WorkerStopped,
)
from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import Attempt
from orchestrator.core.topology import Card, CardSet, Node
from orchestrator.on_ray.executor import RayExecutor
from orchestrator.on_ray.local_cluster import LocalCluster

_numbers = itertools.count(1)


def emulated_node(name: str, kind: Accelerator, indices: tuple[int, ...], server: int) -> Node:
    return Node(
        node_id=name,
        name=name,
        accelerator=kind,
        card_indices=indices,
        server_cards=server,
        memory_bytes_per_card=512 * 2**20,
        emulated=True,
    )


@dataclass
class Bench:
    cluster: LocalCluster
    executor: RayExecutor
    ports_before: set[int] = field(default_factory=set)  # of this process, which are not Ray's
    seen: list[Event] = field(default_factory=list)

    def wait_for(self, wanted, timeout_s=40.0, *, since=0) -> Any:
        deadline = time.monotonic() + patience(timeout_s)
        position = since
        while True:
            for event in self.seen[position:]:
                if wanted(event):
                    return event
            position = len(self.seen)
            assert time.monotonic() < deadline, f"in {timeout_s} s only came {self.seen[-8:]}"
            self.seen += self.executor.events(0.5)

    def remove(self, name: str) -> None:
        """Kill a node and everything on it."""
        node = self.cluster.ray_nodes.pop(name)
        self.cluster.ray_cluster.remove_node(node, allow_graceful=False)

    def joined(self, of: Callable[[Node], bool], since: int = 0) -> Node:
        event: NodeJoined = self.wait_for(
            lambda e: isinstance(e, NodeJoined) and of(e.node), since=since
        )
        return event.node

    def node(self, name: str) -> Node:
        return self.joined(lambda node: node.name == name)

    def joined_again(self, node_id: str, since: int) -> Node:
        return self.joined(lambda node: node.node_id == node_id, since)

    def ready(self, worker_id: str) -> WorkerReady:
        def is_it(event: Event) -> bool:
            mine = getattr(event, "worker_id", None) == worker_id
            assert not (mine and isinstance(event, WorkerStopped)), event
            return mine and isinstance(event, WorkerReady)

        event: WorkerReady = self.wait_for(is_it)
        return event

    def start(self, *cards: Card) -> list[WorkerReady]:
        ids = [f"w{next(_numbers)}" for _ in cards]
        for rank, (worker_id, card) in enumerate(zip(ids, cards, strict=True)):
            self.executor.perform(
                StartWorker(
                    worker_id=worker_id,
                    card=card,
                    rank=rank,
                    local_rank=rank,
                    world_size=len(cards),
                    gang=tuple(each.index for each in cards) if len(cards) > 1 else (),
                )
            )
        return [self.ready(worker_id) for worker_id in ids]

    def run(self, cards: CardSet, workers: list[WorkerReady], model: str) -> str:
        job = a_job(model=model, accelerator=cards[0].accelerator, cards=len(cards))
        attempt_id = f"{job.job_id}-{next(_numbers)}"
        attempt = Attempt(attempt_id=attempt_id, job_id=job.job_id, number=1, job=job, cards=cards)
        ids = tuple(worker.worker_id for worker in workers)
        self.executor.perform(RunAttempt(attempt=attempt, worker_ids=ids))
        return attempt_id

    def ended(self, attempt_id: str, timeout_s: float = 40.0) -> AttemptEnded:
        event: AttemptEnded = self.wait_for(
            lambda e: isinstance(e, AttemptEnded) and e.outcome.attempt_id == attempt_id,
            timeout_s,
        )
        return event

    def stopped(self, worker_id: str, timeout_s: float = 40.0) -> WorkerStopped:
        event: WorkerStopped = self.wait_for(
            lambda e: isinstance(e, WorkerStopped) and e.worker_id == worker_id, timeout_s
        )
        return event

    def stop(self, *workers: WorkerReady) -> None:
        for worker in workers:
            self.executor.perform(StopWorker(worker_id=worker.worker_id, reason="test is over"))
        for worker in workers:
            assert self.stopped(worker.worker_id).failure is None

    def until(self, holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + patience(timeout_s)
        while not holds():
            assert time.monotonic() < deadline, self.executor.progress()
            self.seen += self.executor.events(0.2)

    def wait_for_phase(self, worker_id: str, phase: str) -> None:
        heard = self.executor.progress
        self.until(lambda: worker_id in heard() and heard()[worker_id].phase == phase)
