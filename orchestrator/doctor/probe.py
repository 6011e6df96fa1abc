"""Examination of a node, on the node: files, limits and the vendor's tool; no card is used.
Packages are imported in a separate process, so that one that crashes is found."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.core.job import Accelerator
from orchestrator.on_ray.examination import Probe, SharedFacts, Space
from orchestrator.util.host import complete_environment, home_problem, meminfo, memory_use, text_of
from orchestrator.worker.environment import driver_version, kernel, versions
from workloads.devices import CardFacts, device_class
from workloads.engines import ENGINES

#: Packages that every node imports for jobs, by import name.
NEEDED = ("torch", "transformers", "peft", "datasets", "accelerate", "safetensors", "pyarrow")

_IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = ""
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    print("\\n" + json.dumps([name, error]), flush=True)
"""


def examine(
    *,
    kind: Accelerator | None,
    packages: Sequence[str],
    engines: Sequence[str],
    places: Sequence[tuple[str, str]],
    shared: tuple[str, str, str] | None,
    timeout_s: float,
) -> Probe:
    """Return the facts of this host.

    ``kind`` is of its real cards, if any. ``packages`` are import names, ``engines`` the names of
    those that must be there, ``places`` purposes and paths of directories, and ``shared`` is
    directory, name and content of the driver's file.
    """
    complete_environment()
    modules = engine_modules(kind, engines, versions()) if kind is not None else ()
    memory = meminfo()
    governors = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    cstate = text_of(Path("/sys/module/intel_idle/parameters/max_cstate")).strip()
    return Probe(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        versions=versions(),
        import_errors=import_errors(tuple(dict.fromkeys((*packages, *modules))), timeout_s),
        cards=_cards(kind),
        driver_version=driver_version(kind) if kind else None,
        kernel=kernel(),
        kernel_arguments=text_of(Path("/proc/cmdline")).strip(),
        governors=dict(Counter(filter(None, (text_of(file).strip() for file in governors)))),
        max_cstate=int(cstate) if cstate.isdecimal() else None,
        hugepages_asked=hugepages_asked(Path("/")),
        hugepages_total=memory.get("HugePages_Total", 0),
        hugepage_bytes=memory.get("Hugepagesize", 0) * 1024,
        home_problem=home_problem(),
        memory=memory_use(),
        memory_bytes=memory.get("MemTotal", 0) * 1024,
        shared_memory_bytes=_free_bytes("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        spaces=tuple(
            Space(
                purpose=purpose,
                path=path,
                free_bytes=_free_bytes(path),
                unlocked=locks_missing(path) if purpose == "results" else "",
            )
            for purpose, path in places
        ),
        shared=None if shared is None else look_into(*shared),
    )


def engine_modules(
    kind: Accelerator, needed: Collection[str], installed: Collection[str]
) -> tuple[str, ...]:
    """Return the modules of the engines of this kind of card that are needed or installed."""
    modules = (
        package.module
        for engine in ENGINES.values()
        if engine.runs_on(kind.device)
        for package in engine.packages
        if engine.name in needed or any(name in installed for name in package.names)
    )
    return tuple(dict.fromkeys(modules))


def import_errors(packages: Sequence[str], timeout_s: float) -> dict[str, str]:
    """Return errors of packages that do not import, by name."""
    command = [sys.executable, "-c", _IMPORT, *packages]
    trouble = ""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        output = done.stdout
        if done.returncode != 0:
            trouble = f"the interpreter ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        trouble = f"not imported within {timeout_s:.0f} s"
    errors: dict[str, str] = dict.fromkeys(packages, trouble or "not imported")
    for line in output.decode("utf-8", "replace").splitlines():
        if line.startswith('["'):
            name, message = json.loads(line)
            errors[name] = " ".join(message.split())[:300]
    return {name: message for name, message in errors.items() if message}


def look_into(directory: str, name: str, content: str, patience_s: float = 10.0) -> SharedFacts:
    """Find the driver's file, with retries for slow network file systems, and leave one there."""
    base = Path(directory)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            readable = (base / name).read_text(encoding="ascii") == content
            trouble = "" if readable else f"{base / name} is another file than the driver's"
            break
        except OSError as error:
            readable, trouble = False, str(error)
        if time.monotonic() > deadline or not base.is_dir():
            break
        time.sleep(0.5)
    own = f"{name}.{os.getpid()}.{socket.gethostname()}"
    try:
        (base / own).write_text(content, encoding="ascii")
    except OSError as error:
        return SharedFacts(readable=readable, trouble=trouble or str(error))
    return SharedFacts(readable=readable, written=own, trouble=trouble)


def locks_missing(path: str) -> str:
    """Return why files cannot be locked or hard-linked where the path is or will be; "" if so."""
    place = Path(path).expanduser()
    directory = next((one for one in (place, *place.parents) if one.is_dir()), None)
    if directory is None or not os.access(directory, os.W_OK):
        return ""  # which is reported elsewhere
    doing = "make a file"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".nightgrid-doctor-") as file:
            doing = "link"
            link = f"{file.name}.link"
            os.link(file.name, link)
            os.unlink(link)
            doing = "flock"
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"{doing}: {error.strerror or error}"
    return ""


def _cards(kind: Accelerator | None) -> tuple[CardFacts, ...]:
    if kind is None:
        return ()
    device = device_class(kind.device)
    known = device.inventory()
    return tuple(
        replace(
            known.get(index, CardFacts(index=index)),
            occupied=None if card.lost else device.occupied(index),
            lost=card.lost,
            memory_used_bytes=card.memory_used_bytes,
            memory_total_bytes=card.memory_total_bytes,
            temperature_c=card.temperature_c,
        )
        for index, card in sorted(device.telemetry().items())
    )


def hugepages_asked(root: Path) -> dict[str, int]:
    """Return huge pages requested at boot by each sysctl file; a container has its own files."""
    pages = {}
    for file in (root / "etc/sysctl.conf", *sorted((root / "etc/sysctl.d").glob("*.conf"))):
        for line in text_of(file).splitlines():
            if match := re.fullmatch(r"\s*-?vm[./]nr_hugepages\s*=\s*(\d+)\s*", line):
                pages[str(file)] = int(match[1])
    return pages


def _free_bytes(path: str) -> int:
    """Return free space where the path is or will be; 0 if unknown."""
    place = Path(path).expanduser()
    for directory in (place, *place.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(directory).free
    return 0
