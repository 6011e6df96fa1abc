"""Make the peers' environments from PyPI: ``python -m benchmarks.install_peers [.venv-bench]``.

Pins of constraints.txt hold for them too. optimum-benchmark gets an environment of its own inside
(``.venv-bench/optimum-benchmark``), in which transformers is one that it knows (peers-optimum.txt);
Nightgrid is installed there too, to be compared with the same libraries; so does OpenVINO GenAI
(``.venv-bench/openvino``, peers-openvino.txt). hydra-ray-launcher is
installed without what it asks for: it wants a cloudpickle older than the pinned one, which it does
not use itself, and what starts machines at a cloud.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from tools.install import merged

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = "hydra-ray-launcher==1.2.2"
OPTIMUM = "optimum-benchmark"
OPENVINO = "openvino"


def main() -> int:
    """Create the environments if they are not there, then install into them."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv-bench"
    benchmarks = ROOT / "benchmarks"
    pins = ROOT / "constraints.txt"
    print("Installing the peers (some minutes at first) …", flush=True)
    python = _environment(directory)
    done = _install(python, "-c", pins, "-r", benchmarks / "peers.txt")
    if done:
        return done
    done = _install(python, "--no-deps", LAUNCHER)
    if done:
        return done
    return _beside(directory, OPTIMUM, "-e", ROOT) or _beside(directory, OPENVINO)


def _beside(directory: Path, name: str, *more: str | Path) -> int:
    """Make the environment of a peer whose libraries go before the pins, with ``more`` in it."""
    python = _environment(directory / name)
    wanted = ROOT / "benchmarks" / f"peers-{name.partition('-')[0]}.txt"
    pins = directory / name / "constraints.txt"
    pins.write_text(merged((ROOT / "constraints.txt").read_text(), wanted.read_text()))
    done = _install(python, "-c", pins, "-r", wanted, *more)
    # Some ask for a torchvision, whose build is not of the torch that is pinned: nothing imports
    # then. None of them needs it for text.
    uninstall = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"]
    return done or subprocess.run(uninstall, check=False, capture_output=True).returncode


def _environment(directory: Path) -> Path:
    """The Python of an environment, which is made if it is not there."""
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"Making {directory} …", flush=True)
        venv.create(directory, with_pip=True)
        _install(python, "--upgrade", "pip")  # Python's own takes an hour to resolve some of this
    return python


def _install(python: Path, *wanted: str | Path) -> int:
    """Run pip; its last words."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*pip, *wanted], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
