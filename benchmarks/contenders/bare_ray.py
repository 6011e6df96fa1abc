"""Seconds in which Ray starts a cluster of its own and an actor answers, printed."""

import time
from typing import Any

import ray


class Answering:
    """Answers."""

    def answer(self) -> int:
        return 1


if __name__ == "__main__":
    actor: Any = ray.remote(Answering)
    began = time.perf_counter()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    ray.get(actor.options(num_cpus=0).remote().answer.remote())
    print(time.perf_counter() - began)
