"""Seconds in which Ray starts a cluster of its own and an actor answers, printed."""

import time

import ray


@ray.remote(num_cpus=0)
class Actor:
    """Answers."""

    def answer(self) -> int:
        return 1


if __name__ == "__main__":
    began = time.perf_counter()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    ray.get(Actor.remote().answer.remote())
    print(time.perf_counter() - began)
