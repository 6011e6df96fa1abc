"""An actor on a cluster that is not ours: `python stranger.py ADDRESS FILE`.

By Ray's own means alone. The actor asks for the resource `emulated`, so that it runs on a node of
the cluster; there it writes who it is into FILE.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ray

PATIENCE_S = 30.0


class Intruder:
    def __init__(self, proof: str) -> None:
        Path(proof).write_text(f"user {os.getuid()}, process {os.getpid()}")


def main(address: str, proof: str) -> int:
    ray.init(address=address, log_to_driver=False)
    actor = ray.remote(num_cpus=0, resources={"emulated": 0.001})(Intruder)
    actor.options(lifetime="detached", name=f"intruder {os.getpid()}").remote(proof)
    deadline = time.monotonic() + PATIENCE_S
    while not Path(proof).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    print("ran" if Path(proof).exists() else "did not run")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
