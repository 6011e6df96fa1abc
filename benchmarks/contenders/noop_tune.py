"""Trials that do nothing, by Ray Tune in its quickest setting: JOBS NODES CARDS SCRATCH.

Trials are of a class, whose actors are kept for the next trial (``reuse_actors``); as many run at
once as there are cards; nothing is logged and no checkpoint kept. The time of warm actors begins
when as many trials have ended as there are cards.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contender import serve
from benchmarks.contenders.own_cluster import own_cluster_variables


def main() -> None:
    count, nodes, cards = map(int, sys.argv[1:4])
    workers = nodes * cards
    os.environ.update(own_cluster_variables(Path(sys.argv[4])))  # which Ray reads when imported
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(workers)
    import ray
    from ray import tune

    class Nothing(tune.Trainable):  # type: ignore[misc]
        """A trial that is done with its first step."""

        def setup(self, config: dict[str, Any]) -> None:
            """Nothing to set up."""

        def step(self) -> dict[str, Any]:
            """Be done."""
            return {"done": True}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            """Be the next trial."""
            return True

    class Ends(tune.Callback):  # type: ignore[misc]
        """The moment and this process's CPU time at which each trial ended."""

        def __init__(self) -> None:
            self.ended: list[tuple[float, float]] = []

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self.ended.append((time.perf_counter(), time.process_time()))

    # A cluster of its own, beside those of others.
    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)

    def turn() -> dict[str, Any]:
        ends = Ends()
        began = time.perf_counter()
        found = tune.Tuner(
            tune.with_resources(Nothing, {"cpu": 1}),
            param_space={"number": tune.grid_search(list(range(workers + count)))},
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=workers),
            run_config=tune.RunConfig(
                storage_path=sys.argv[4],
                verbose=0,
                callbacks=[ends],
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        ).fit()
        if found.num_errors or len(found) != workers + count:
            raise RuntimeError(f"{found.num_errors} errors, {len(found)} of {workers + count}")
        first, last = ends.ended[workers - 1], ends.ended[-1]
        return {
            "work": count,
            "wall_s": last[0] - first[0],
            "cpu_s": last[1] - first[1],
            "whole_jobs": workers + count,
            "whole_s": time.perf_counter() - began,
        }

    serve(turn)


if __name__ == "__main__":
    main()
