"""Make the peers' environment, .venv-bench, from PyPI: ``python -m benchmarks.install_peers``.

Pins of constraints.txt hold for it too, but for packages that a peer wants older: those are
listed in ``RELEASED``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: hydra-ray-launcher takes cloudpickle below 3.
RELEASED = ("cloudpickle", "aiohttp")


def main() -> int:
    """Create the environment if it is not there, then install into it."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv-bench"
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"Making {directory} …", flush=True)
        venv.create(directory, with_pip=True)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0].lower() not in RELEASED]
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
        print("Installing the peers (some minutes at first) …", flush=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        wanted = ["-c", str(constraints), "-r", str(ROOT / "benchmarks" / "peers.txt")]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run([*pip, *wanted], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
