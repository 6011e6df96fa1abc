"""The machine of a run: cores, memory, load, versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

_OURS = ("torch", "transformers", "ray", "peft", "pyarrow", "accelerate")
_PEERS = (*_OURS[:3], "hydra-core", "hydra-ray-launcher")
_BESIDE_OPTIMUM = ("optimum-benchmark", *_OURS[:3])
#: Instructions that decide how fast a processor multiplies, as Linux names them.
_FAST = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for name in sys.argv[1:]:\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: found[name] = None\n"
    "print(json.dumps(found))"
)


def machine() -> dict[str, Any]:
    """The host as it is now."""
    return {
        "processor": _processor(),
        "fast_arithmetic": [name for name in _FAST if name in _flags()],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1_min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "accelerator": "none: everything here ran on the CPU",
    }


def code(root: Path) -> dict[str, Any]:
    """The state of the code: its commit, and how many files differ from it (the page does not
    count); None where git does not know."""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(root), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", ".", ":!docs/benchmarks.md")
    return {
        "commit": commit and commit.strip(),
        "changed_files": None if changed is None else len(changed.splitlines()),
    }


def cores_used(seconds: float = 1.0) -> float:
    """Cores that programs use while this one waits; 0 where nobody tells."""
    began, (wanted, stolen) = time.perf_counter(), wanted_and_stolen()
    time.sleep(seconds)
    wanted_now, stolen_now = wanted_and_stolen()
    ticks = wanted_now - wanted - (stolen_now - stolen)
    return ticks / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - began)


def wanted_and_stolen() -> tuple[int, int]:
    """Of all cores since the host started, in ticks: the time in which something was to run, and
    how much of it a virtual machine was not given (``steal`` of proc_stat(5)). Zeros where there is
    no such file."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return 0, 0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    return user + nice + system + irq + softirq + steal, steal


def versions(
    peers_python: Path | None, optimum_python: Path | None
) -> dict[str, dict[str, str | None]]:
    """Versions here and in the peers' environments, where there are such."""
    here: dict[str, str | None] = {}
    for name in _OURS:
        try:
            here[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            here[name] = None
    found: dict[str, dict[str, str | None]] = {"nightgrid": here}
    there = {
        "peers": (peers_python, _PEERS),
        "the grid's two contenders": (optimum_python, _BESIDE_OPTIMUM),
    }
    found |= {
        who: _versions_there(python, names)
        for who, (python, names) in there.items()
        if python is not None
    }
    return found


def _versions_there(python: Path, names: tuple[str, ...]) -> dict[str, str | None]:
    told = subprocess.run([str(python), "-c", _ASK, *names], capture_output=True, text=True)
    told.check_returncode()
    found: dict[str, str | None] = json.loads(told.stdout)
    return found


def _processor() -> str:
    return _of_the_first("model name") or platform.processor() or platform.machine()


def _flags() -> list[str]:
    return _of_the_first("flags").split()


def _of_the_first(name: str) -> str:
    """The kernel's word on the first processor under this name; nothing where it has none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.partition(":")[0].strip() == name:
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""
