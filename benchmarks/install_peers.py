"""Make the peers' environment, .venv-bench, from PyPI: ``python -m benchmarks.install_peers``.

Pins of constraints.txt hold for it too. hydra-ray-launcher is installed without what it asks for:
it wants a cloudpickle older than the pinned one, which it does not use itself, and what starts
machines at a cloud.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = "hydra-ray-launcher==1.2.2"


def main() -> int:
    """Create the environment if it is not there, then install into it."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv-bench"
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"Making {directory} …", flush=True)
        venv.create(directory, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    print("Installing the peers (some minutes at first) …", flush=True)
    for wanted in (
        ["--upgrade", "pip"],  # the one that comes with Python takes an hour to resolve this
        [*constraints, "-r", str(ROOT / "benchmarks" / "peers.txt")],
        ["--no-deps", LAUNCHER],
    ):
        done = subprocess.run([*pip, *wanted], env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
