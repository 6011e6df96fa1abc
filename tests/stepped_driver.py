"""A driver with real worker processes and no Ray: `python stepped_driver.py DIR GRID`.

All is real, from the schedule to the workers' processes, except for the calls between the driver
and its one node, which are made directly. If its clock can be set (``chaos_clock.py``), it jumps
while attempts run. Printed as JSON, last line: the rows.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chaos_clock import SteppedClock

from orchestrator import __version__
from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.events import NodeJoined
from orchestrator.core.job import Accelerator, Job
from orchestrator.core.plan import Action, Plan, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.driver.board import Board, Watchdog
from orchestrator.driver.loop import Driver
from orchestrator.grid.parser import load_grid
from orchestrator.on_ray import executor as executor_module
from orchestrator.scheduler.estimator import Estimate
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
from orchestrator.store.store import Store
from orchestrator.watch.live import PlainView
from orchestrator.worker.node_workers import NodeWorkers
from orchestrator.worker.protocol import Durable, HostFacts, Outbox, Request, ResponseBatch
from orchestrator.worker.spawn import PRELOAD, OwnSpawner

CARDS = 2
#: Hours by which the clock is wrong from so many rows on.
STEPS = {1: 2, 4: -2}
NODE = Node(
    node_id="node",
    name="hpu-1",
    accelerator=Accelerator.HPU,
    card_indices=tuple(range(CARDS)),
    server_cards=CARDS,
    memory_bytes_per_card=int(os.environ.get("CARD_MEMORY_BYTES", 512 * 2**20)),
    emulated=True,
)


class Known:
    def estimate(self, job: Job) -> Estimate:
        return Estimate(load_s=0.1, run_s=5.0)


class Channel:
    """A channel whose requests are carried out as they are put."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._responses = Outbox[Any]()
        self._workers = NodeWorkers(lambda response, _: self._responses.put(response))

    def put(self, request: Request) -> None:
        if not isinstance(request, Durable):
            self._workers.do(request)

    def send(self) -> None:
        """All is sent."""

    @property
    def heard_at(self) -> float:
        return self._clock()

    def responses(self, timeout_s: float) -> ResponseBatch:
        first, responses = self._responses.pending(timeout_s)
        self._responses.confirm(first + len(responses) - 1)
        return ResponseBatch(first, responses, 0, self._workers.progress(), None, False)


class OneNode:
    """In the place of ``Claims``: one node that is there from the start."""

    poll_interval_s = 0.2

    def __init__(self, *, clock: Any, arrived: Any, report: Any, **_: Any) -> None:
        facts = HostFacts(
            hostname="here",
            address="127.0.0.1",
            cores=1,
            threads=1,
            version=__version__,
            server=spawner.shared.path,
            log_dir=str(HOME / "logs"),
        )
        self._claim = SimpleNamespace(node=NODE, facts=facts, channel=Channel(clock))
        self._arrived = arrived
        report(NodeJoined(at=clock(), node=NODE))

    def poll(self) -> None:
        self._arrived(self._claim, self._claim.channel.responses(0.05))

    def of(self, _: str) -> Any:
        return self._claim

    def joined(self) -> list[Any]:
        return [self._claim]

    def lose_if_silent(self, claim: Any, patience_s: float) -> bool:
        return False

    def close(self) -> None:
        """The processes end with their server."""


def step_clock(_: object) -> None:
    ROWS.append(time.monotonic())
    hours = STEPS.get(len(ROWS))
    if hours is not None and "CHAOS_CLOCK" in os.environ:
        SteppedClock(Path(os.environ["CHAOS_CLOCK"]), Path()).step(3600 * hours)


def main() -> list[dict[str, Any]]:
    executor_module.Claims = OneNode  # type: ignore[assignment,misc]
    quiet = SimpleNamespace(wait=lambda _: None, clear=lambda: None, add=lambda *_: None)
    executor_module.Calls = lambda: quiet  # type: ignore[assignment,misc]
    jobs = [PlannedJob(job=job, action=Action.RUN) for job in load_grid(sys.argv[2]).jobs()]
    clock = inspect.signature(executor_module.RayExecutor).parameters["clock"].default
    with Store.open(HOME, "night") as store:
        executor = executor_module.RayExecutor(run="night")
        driver = Driver(
            schedule=Schedule(jobs, ScheduleSettings(), Known()),
            executor=executor,
            store=store,
            to_measurement=lambda record: measurement_of(
                record, run="night", invocation_id="i", recorded_at=time.time(), nodes=[NODE]
            ),
            board=Board(
                run="night",
                plan=Plan(grid_name="g", jobs=tuple(jobs), nodes=(NODE,)),
                started_at=clock(),
            ),
            view=PlainView(sys.stdout),
            logged=step_clock,
            watchdog=Watchdog(),
            sleep=time.sleep,
        )
        assert driver.drive().finished
        rows = store.measurements()
    spawner.close()
    return [
        {
            "state": row.state,
            "reason": row.reason,
            "asked": row.batch_size_requested,
            "batch_size": row.batch_size,
            "final": row.final,
            "took_s": (row.ended_at or 0) - (row.started_at or 0),
        }
        for row in rows
    ]


if __name__ == "__main__":
    HOME = Path(sys.argv[1])
    ROWS: list[float] = []
    (HOME / "logs").mkdir()
    spawner = OwnSpawner(PRELOAD, threads=1, log=HOME / "logs" / "spawner.log")
    print(json.dumps(main()))
