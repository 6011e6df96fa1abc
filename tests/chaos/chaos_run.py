"""``python chaos_run.py run GRID …``: `nightgrid` with the chaos workload, light workers that are
forked, and a watchdog with little patience. All else is the real thing."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from chaos_worker import LOGS, register

#: Seconds that a job may stand still.
HANG_S = 15.0


def main(arguments: list[str]) -> int:
    register()
    from orchestrator.cli.main import main as nightgrid
    from orchestrator.driver import board
    from orchestrator.on_ray import executor
    from orchestrator.worker import spawn

    limits: Any = board.PHASE_LIMITS_S
    # A worker that is frozen between two jobs never tells that the next one began.
    limits.update(start=2 * HANG_S, warmup=HANG_S, measure=HANG_S)
    setattr(board, "MEASURE_FACTOR", 0.0)  # noqa: B010
    spawn.PRELOAD = ("orchestrator.worker.worker", "chaos_worker")
    logs = Path(os.environ[LOGS]) if os.environ.get(LOGS) else None
    light: Any = partial(executor.RayExecutor, factory="chaos_worker:ChaosWorker", log_dir=logs)
    executor.RayExecutor = light
    return nightgrid(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
