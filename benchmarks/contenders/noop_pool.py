"""A pool of warm Ray actors, written by hand: JOBS NODES CARDS SCRATCH ACTORS AT_ONCE.

AT_ONCE jobs travel in one call. With 1 and as many actors as cards this is Ray's ``ActorPool`` as
its documentation shows it; few actors with several jobs a call are the most that Ray carries.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
from ray.util import ActorPool

from benchmarks.contender import serve
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import parse_emulation
from orchestrator.on_ray.local_cluster import emulate


@ray.remote(num_cpus=0, resources={"HPU": 1})
class Actor:
    """Runs nothing."""

    def run(self, numbers: list[int]) -> list[int]:
        return numbers


def main() -> None:
    count, nodes, cards = map(int, sys.argv[1:4])
    most, at_once = map(int, sys.argv[5:7])
    many = min(most, nodes * cards)
    with emulate(parse_emulation(f"{nodes}x{cards}", [Accelerator.HPU])):
        actors = [Actor.remote() for _ in range(many)]
        ray.get([actor.run.remote([0]) for actor in actors])
        calls = [list(range(n, min(n + at_once, count))) for n in range(0, count, at_once)]

        def turn() -> dict[str, Any]:
            pool = ActorPool(actors)
            began = time.perf_counter()
            done = sum(map(len, pool.map_unordered(lambda a, n: a.run.remote(n), calls)))
            return {"work": done, "wall_s": time.perf_counter() - began}

        serve(turn)


if __name__ == "__main__":
    main()
