"""A sweep of jobs that do nothing, by hydra-ray-launcher: JOBS NODES CARDS SCRATCH.

The sweep is a command of its own, as Hydra's are, and Ray starts within it: only its whole time
from nothing is known, which stands beside that of others from nothing.
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
import hydra

@hydra.main(version_base=None, config_path=None)
def nothing(config):
    return 0

nothing()
"""


def main() -> None:
    count, nodes, cards = map(int, sys.argv[1:4])
    program = Path(sys.argv[4]) / "hydra_sweep.py"
    program.write_text(PROGRAM)
    variables = own_cluster_variables(Path(sys.argv[4]))
    numbers = ",".join(str(number) for number in range(count))

    def turn() -> dict[str, Any]:
        began = time.perf_counter()
        subprocess.run(
            [
                sys.executable,
                str(program),
                "--multirun",
                "hydra/launcher=ray",
                "hydra.launcher.ray.init.address=local",  # beside those of others
                f"+hydra.launcher.ray.init.num_cpus={nodes * cards}",
                f"+number={numbers}",
                f"hydra.sweep.dir={Path(sys.argv[4]) / 'sweep'}",
            ],
            check=True,
            cwd=sys.argv[4],
            env=os.environ | variables,
        )
        whole_s = time.perf_counter() - began
        return {"work": count, "whole_jobs": count, "whole_s": whole_s}

    serve(turn)


if __name__ == "__main__":
    main()
