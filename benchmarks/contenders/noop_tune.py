"""Trials that do nothing, by Ray Tune's grid_search: JOBS NODES CARDS SCRATCH."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.contender import serve
from benchmarks.contenders.own_cluster import own_cluster_variables


def nothing(config: dict[str, Any]) -> dict[str, int]:
    """A trial."""
    return {"done": config["number"]}


def main() -> None:
    count, nodes, cards = map(int, sys.argv[1:4])
    os.environ.update(own_cluster_variables(Path(sys.argv[4])))  # which Ray reads when imported
    import ray
    from ray import tune

    ray.init(num_cpus=nodes * cards, include_dashboard=False, log_to_driver=False)

    def turn() -> dict[str, Any]:
        tuner = tune.Tuner(
            tune.with_resources(nothing, {"cpu": 1}),
            param_space={"number": tune.grid_search(list(range(count)))},
            run_config=tune.RunConfig(storage_path=sys.argv[4], verbose=0),
        )
        found = tuner.fit()
        if found.num_errors or len(found) != count:
            raise RuntimeError(f"{found.num_errors} errors, {len(found)} of {count} trials")
        return {"work": count}

    serve(turn)


if __name__ == "__main__":
    main()
