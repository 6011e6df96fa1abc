"""The product as the oracles call it: the command line, a run's rows, job ids, simulated nights.

Every import of a product's module is in this file, so that moves and renames touch it alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
_STREAMS = ("stdout", "stderr")


def command(*arguments: str) -> tuple[int, str, str]:
    """Run a command line in this process: its exit code, standard output and standard error."""
    from orchestrator.cli.main import main

    with contextlib.ExitStack() as stack:
        # Real files: the product writes to descriptors.
        files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in "12"]
        for name, file in zip(_STREAMS, files, strict=True):
            stack.enter_context(patch.object(sys, name, file))
        try:
            code = main(list(arguments))
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
    return code, texts[0], texts[1]


def write_run(directory: Path, table: Any) -> None:
    """Write rows as a run's directory, in the form of version 0.1.0, which every version reads."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    metadata = {b"nightgrid.schema_version": b"1"}
    pq.write_table(table.replace_schema_metadata(metadata), buffer)
    data = buffer.getvalue()
    rows = directory / "rows"
    rows.mkdir(parents=True)
    digest = hashlib.sha256(data).hexdigest()[:16]
    (rows / f"rows-{table.num_rows}-1-{digest}.parquet").write_bytes(data)


def job_ids(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Frozen id and present id of jobs as a grid has them; rules are off, since what runs nowhere
    has an id as well. Settings that were removed are in the job as its row has them."""
    from orchestrator.grid.parser import parse_grid
    from orchestrator.grid.vocabulary import Vocabulary
    from workloads.registry import WORKLOADS

    vocabulary = replace(
        Vocabulary.installed(check_data=False),
        workloads={name: replace(entry, refuse=None) for name, entry in WORKLOADS.items()},
    )
    removed = vocabulary.removed_settings()
    for line in lines:
        written = {name: value for name, value in line["job"].items() if name not in removed}
        grid = {"name": "frozen", "experiments": [{"name": "one", **written}]}
        try:
            read = parse_grid(json.dumps(grid).encode(), "grid", vocabulary=vocabulary)
            (job,) = read.jobs()
        except Exception as error:
            yield line["job_id"], f"{type(error).__name__}:refused"
        else:
            of_row = {name: value for name, value in line["job"].items() if name in removed}
            parameters = tuple(sorted({**dict(job.parameters), **of_row}.items()))
            yield line["job_id"], replace(job, parameters=parameters).job_id


def exit_code_names() -> dict[str, int]:
    """Exit codes by name: of the table's constants, and of the table itself."""
    from orchestrator.core import errors

    named = {name: code for name, code in vars(errors).items() if isinstance(code, int)}
    return named | {f"code_{code}": code for code in errors.MEANINGS}


def simulated_night(seed: int) -> dict[str, Any]:
    """One night of the real schedule on virtual cards, all of it drawn from the seed: its commands
    and its figures."""
    from orchestrator.core.events import StopRequested
    from orchestrator.core.job import Accelerator, Job
    from orchestrator.core.plan import Action, PlannedJob
    from orchestrator.core.topology import Node
    from orchestrator.scheduler.estimator import Estimate
    from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings
    from orchestrator.scheduler.simulator import Faults, SimulationSettings, simulate
    from workloads.base import MeasureSettings

    class Durations:
        """Half a minute to ten minutes, by job."""

        def estimate(self, job: Job) -> Estimate:
            """Known exactly."""
            return Estimate(load_s=20.0, run_s=Random(f"{seed} {job.dataset}").uniform(30, 600))

    draw = Random(f"oracle {seed}")
    cards = draw.choice([2, 8, 8])
    nodes = [_node(Node, Accelerator.HPU, f"n{n}", cards) for n in range(draw.choice([1, 2, 3]))]
    planned: list[PlannedJob] = []
    replicates = draw.choice([1, 1, 2])
    for number in range(draw.randint(15, 60)):
        job = Job(
            experiment="e",
            workload="text-generation",
            model=f"m{draw.randrange(5)}",
            dataset=f"d{number // replicates}",
            accelerator=Accelerator.HPU,
            cards=draw.choice([w for w in (1, 1, 1, 1, 2, 4, 8) if w <= cards]),
            precision="bf16",
            batch_size=8,
            engine="transformers",
            isolation=draw.choice(["warm", "warm", "process"]),
            parameters=(),
            measure=MeasureSettings(),
        )
        if number % replicates:
            job = replace(planned[-1].job, replicate=2)
        needs = (planned[number - 3].job.job_id,) if number % 7 == 6 else ()
        action = Action.UNSUPPORTED if draw.random() < 0.03 else Action.RUN
        planned.append(PlannedJob(job=job, action=action, needs=needs if seed % 4 == 0 else ()))
    rate = draw.choice([0.0, 0.0, 0.03, 0.1])
    losses = tuple(sorted(draw.uniform(50, 3000) for _ in range(draw.choice([0, 0, 0, 1, 2]))))
    faults = Faults.at_rate(rate, node_losses=losses)
    until = draw.choice([inf, inf, inf, draw.uniform(600, 3000)])
    stop = [StopRequested(at=draw.uniform(300, 2000), reason="stop")] if seed % 10 == 9 else []
    log: list[str] = []
    decide = Schedule.handle
    with patch.object(Schedule, "handle", _recording(decide, log)):
        result = simulate(
            planned,
            nodes,
            Durations(),
            settings=SimulationSettings(seed=seed, faults=faults),
            schedule_settings=ScheduleSettings(work_until=until),
            extra_events=stop,
        )
    return {
        "jobs": len(planned),
        "cards": cards * len(nodes),
        "makespan_s": result.makespan_s,
        "bound_s": result.bound_s,
        "attempts": result.attempts,
        "workers": result.workers,
        "commands": log,
    }


def _node(make: Callable[..., Any], accelerator: Any, name: str, cards: int) -> Any:
    places = tuple(range(cards))
    return make(
        node_id=name, name=name, accelerator=accelerator, card_indices=places, server_cards=cards
    )


def _recording(decide: Callable[..., Any], log: list[str]) -> Callable[..., Any]:
    """The schedule's decisions, with each command that acts on the world as one line of the log.
    Timers are left out: they are the schedule's own affair."""
    from orchestrator.core.events import RecordRow, RunAttempt, StartWorker, StopWorker

    def handle(self: Any, event: Any, **options: Any) -> Any:
        commands = decide(self, event, **options)
        for one in commands:
            if isinstance(one, StartWorker):
                parts = ["start", one.worker_id, str(one.card), f"{one.rank}/{one.world_size}"]
            elif isinstance(one, StopWorker):
                parts = ["stop", one.worker_id]
            elif isinstance(one, RunAttempt):
                parts = ["run", one.attempt.attempt_id, "+".join(one.worker_ids)]
            elif isinstance(one, RecordRow):
                attempt = one.attempt.attempt_id if one.attempt else "none"
                final = "final" if one.final else "again"
                parts = ["row", one.job.job_id, attempt, str(one.state), final]
            else:
                continue
            log.append(",".join([f"{event.at:.3f}", *parts]).replace(" ", "_"))
        return commands

    return handle
