"""A run of a grid whose attempts take turns with a plain script.

night_beside_script.py GRID RESULTS MODEL_DIRECTORY PROMPTS.json OUTPUT_TOKENS BATCH_SIZE REPEATS

The speed of a shared processor drifts by a tenth within minutes, far more than what is looked for.
So the script has a turn before each attempt and one at the end: every attempt stands between two
of its turns. All else is a run as ever, schedule, driver, Ray and rows; only that the executor is
handed an attempt when the script is done.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from benchmarks.contender import Contender, serve
from benchmarks.night import check_threads
from orchestrator.core.events import RunAttempt, StartWorker, StopWorker
from orchestrator.core.measurement import Measurement
from orchestrator.driver.options import RunOptions
from orchestrator.driver.run import run_grid
from orchestrator.on_ray.executor import RayExecutor


def main() -> None:
    grid, results = map(Path, sys.argv[1:3])
    script_command = [sys.executable, Path(__file__).with_name("bare_generation.py"), *sys.argv[3:]]

    def turn() -> dict[str, Any]:
        started: dict[str, float | None] = {}  # by attempt: seconds that its new process took
        starting: list[float] = []
        perform = RayExecutor.perform

        with Contender("script", script_command, results / "script.log") as script:
            imports_s = script.ready()

            def after_the_script(
                executor: RayExecutor, command: StartWorker | StopWorker | RunAttempt
            ) -> None:
                if isinstance(command, StartWorker):
                    starting.append(perf_counter())
                elif isinstance(command, RunAttempt):
                    took_s = perf_counter() - starting.pop() if starting else None
                    started[command.attempt.attempt_id] = took_s
                    script.turn()
                perform(executor, command)

            with patch.object(RayExecutor, "perform", after_the_script):
                options = RunOptions(results=results, emulate="1x1:CPU", quiet=True)
                outcome = run_grid(grid, options)
            script.turn()
        rows = {row.attempt_id: row for row in outcome.store.read().measurements}
        if not outcome.answered or set(rows) != set(started):
            raise RuntimeError(f"of {len(started)} attempts: {dict(outcome.states)}")
        check_threads(rows.values())
        return {
            "work": len(rows),
            "attempts": [_figures(rows[each], start_s) for each, start_s in started.items()],
            "script": script.turns,
            "imports_s": imports_s,
        }

    serve(turn)


def _figures(row: Measurement, start_s: float | None) -> dict[str, Any]:
    """The script's account of its turns, of an attempt; None for the start of a warm worker."""
    passes: dict[int, list[Any]] = {}
    for _, sample in row.samples:
        if not sample.warmup and sample.complete:
            passes.setdefault(sample.repeat, []).append(sample)
    return {
        "tokens_per_s": median(_rate(each, "wall_s") for each in passes.values()),
        "tokens_per_cpu_s": median(_rate(each, "cpu_s") for each in passes.values()),
        "peak_mib": (row.peak_host_memory_bytes or 0) / 2**20,
        "load_s": row.load_s or 0.0,
        "start_s": start_s,
    }


def _rate(samples: list[Any], time_of: str) -> float:
    tokens = sum(sample.output_tokens for sample in samples)
    return float(tokens / sum(getattr(sample, time_of) for sample in samples))


if __name__ == "__main__":
    main()
