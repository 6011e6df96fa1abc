"""A sweep of jobs that do nothing, by hydra-ray-launcher: JOBS NODES CARDS SCRATCH.

The sweep is a command of its own, as Hydra's are, and Ray starts within it. Each job writes down
when it ends. The time of warm workers begins when as many jobs have ended as there are cards.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contender import serve
from benchmarks.contenders.own_cluster import own_cluster_variables

PROGRAM = """
import time

import hydra

@hydra.main(version_base=None, config_path=None)
def nothing(config):
    with open({ends!r}, "a") as ends:
        ends.write(f"{{time.time()}}\\n")

nothing()
"""


def main() -> None:
    count, nodes, cards = map(int, sys.argv[1:4])
    workers = nodes * cards
    program, ends = (Path(sys.argv[4]) / name for name in ("hydra_sweep.py", "hydra_ends"))
    program.write_text(PROGRAM.format(ends=str(ends)))
    variables = own_cluster_variables(Path(sys.argv[4]))
    numbers = ",".join(str(number) for number in range(workers + count))

    def turn() -> dict[str, Any]:
        ends.write_text("")
        began = time.perf_counter()
        subprocess.run(
            [
                sys.executable,
                str(program),
                "--multirun",
                "hydra/launcher=ray",
                "hydra.launcher.ray.init.address=local",  # beside those of others
                f"+hydra.launcher.ray.init.num_cpus={workers}",
                f"+number={numbers}",
                f"hydra.sweep.dir={Path(sys.argv[4]) / 'sweep'}",
            ],
            check=True,
            cwd=sys.argv[4],
            env=os.environ | variables,
        )
        whole_s = time.perf_counter() - began
        ended = sorted(map(float, ends.read_text().split()))
        if len(ended) != workers + count:
            raise RuntimeError(f"{len(ended)} of {workers + count} jobs ended")
        return {
            "work": count,
            "wall_s": ended[-1] - ended[workers - 1],
            "cpu_s": None,  # of its driver, which is a process of its own
            "whole_jobs": workers + count,
            "whole_s": whole_s,
        }

    serve(turn)


if __name__ == "__main__":
    main()
