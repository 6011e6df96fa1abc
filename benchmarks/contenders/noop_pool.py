"""A pool of warm Ray actors, written by hand: JOBS NODES CARDS SCRATCH."""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.util import ActorPool

from benchmarks.contender import serve
from orchestrator.domain.job import Accelerator
from orchestrator.domain.topology import parse_emulation
from orchestrator.on_ray.cluster import emulate


@ray.remote(num_cpus=0, resources={"HPU": 1})
class Actor:
    """Runs nothing."""

    def run(self, number: int) -> int:
        return number


def main() -> None:
    count, nodes, cards = map(int, sys.argv[1:4])
    with emulate(parse_emulation(f"{nodes}x{cards}", [Accelerator.HPU])):
        actors = [Actor.remote() for _ in range(nodes * cards)]
        ray.get([actor.run.remote(0) for actor in actors])

        def turn() -> dict[str, Any]:
            pool = ActorPool(actors)
            done = list(pool.map_unordered(lambda a, n: a.run.remote(n), range(count)))
            return {"work": len(done)}

        serve(turn)


if __name__ == "__main__":
    main()
