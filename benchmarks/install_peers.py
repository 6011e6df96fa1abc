"""Make the peers' environments from PyPI: ``python -m benchmarks.install_peers [.venv-bench]``.

Pins of constraints.txt hold for them too. optimum-benchmark gets an environment of its own inside
(``.venv-bench/optimum-benchmark``), in which transformers is one that it knows (peers-optimum.txt);
Nightgrid is installed there too, to be compared with the same libraries. hydra-ray-launcher is
installed without its dependencies: it asks for a cloudpickle older than the pinned one, which it
does not use, and for what starts machines at a cloud. At the end every peer is imported once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from tools.install import merged

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = "hydra-ray-launcher==1.2.2"
OPTIMUM = "optimum-benchmark"
#: Modules that contenders import, by the environment below the directory.
IMPORTED = {
    "": (
        "ray.tune",
        "hydra_plugins.hydra_ray_launcher._core",
        "peft",
        "trl",
    ),
    OPTIMUM: ("optimum_benchmark", "orchestrator.cli.main"),
}


def main() -> int:
    """Create the environments if they are not there, then install into them."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv-bench"
    began = time.monotonic()
    done = _install_all(directory) or max(
        importable(directory / name, modules) for name, modules in IMPORTED.items()
    )
    if not done:
        print(f"All peers import; {time.monotonic() - began:.0f} s", flush=True)
    return done


def importable(environment: Path, modules: Sequence[str]) -> int:
    """Import modules by the Python of an environment; if one fails, say which, and return 1."""
    python = environment / "bin" / "python"
    told = subprocess.run(
        [python, "-c", f"import {', '.join(modules)}"],
        env=_without_paths(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if told.returncode:
        print(f"{environment}: one of {', '.join(modules)} does not import:\n{told.stdout[-1500:]}")
    return int(told.returncode != 0)


def _install_all(directory: Path) -> int:
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
    return _beside(directory, OPTIMUM, "-e", ROOT)


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
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*pip, *wanted], env=_without_paths(), check=False).returncode


def _without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main())
