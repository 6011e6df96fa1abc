"""Seconds in which Ray starts and an actor answers, printed: `stock` by `ray.init`, on the nodes of
an emulation (`2x8`) as Nightgrid starts them, or on a cluster that runs already (`HOST:PORT`).
Nothing else of Nightgrid runs in any."""

import contextlib
import sys
import time
from typing import Any

import ray

from orchestrator.core.job import Accelerator
from orchestrator.core.topology import parse_emulation
from orchestrator.on_ray.local_cluster import emulate


class Answering:
    """Answers."""

    def answer(self) -> int:
        return 1


def main() -> None:
    actor: Any = ray.remote(Answering)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if sys.argv[1] == "stock":
            ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        elif ":" in sys.argv[1]:
            ray.init(address=sys.argv[1], log_to_driver=False)
        else:
            stack.enter_context(emulate(parse_emulation(sys.argv[1], [Accelerator.HPU])))
        ray.get(actor.options(num_cpus=0).remote().answer.remote())
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
