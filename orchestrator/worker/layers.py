"""Layers: packages of other versions over those of a node, for jobs that name ``software``.

A layer holds the packages that a job names and the dependencies that must change with them, as pip
(or uv) resolves them against what is installed, by the node's own configuration. It comes first in
the path of a worker's interpreter, so all else, torch above all, stays the node's own. A node makes
each once, in its cache, by the content that decides it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from orchestrator.core.job import Job
from orchestrator.util.format import one_line, plural
from orchestrator.util.redaction import redact
from workloads.base import BadConfiguration, NodeStorage
from workloads.data.cache import cache_root, cached_directory
from workloads.devices import Finding, Level
from workloads.engines import split_kind
from workloads.util.processes import end_group

#: Set in a process with a layer, to its directory.
VARIABLE = "NIGHTGRID_LAYER"
#: Most that pip may take for one layer.
LIMIT_S = 1800.0
_POLL_S = 0.2
#: What pip and uv say when the index, and not the request, is at fault.
_TRANSIENT = re.compile(
    r"retrying|timed? ?out|connection|temporary failure|name resolution|unreachable|proxy"
    r"|HTTP error 5|incomplete|error sending request",
    re.IGNORECASE,
)
_FULL = re.compile(r"no space left|quota exceeded", re.IGNORECASE)
#: All but the newest three of the versions that pip lists.
_OLDER = re.compile(r"(\(from versions: )(?:[^,()]+, )+(?=(?:[^,()]+, ){2}[^,()]+\))")
_NEW = re.compile(r"^ \+ (\S+==\S+)$", re.MULTILINE)  # as uv lists what it would install

#: Refusals of this process's node that another try cannot change, by layer.
_refused: dict[str, str] = {}

Stopped = Callable[[], bool]


def make_layer(software: str, stopped: Stopped = lambda: False) -> Path:
    """Return the directory of a layer, made if it is not there; waits for another that makes it.

    Raises BadConfiguration if there is no such package, or it fits nothing here; never tried again;
    ImportError if the index did not answer; NodeStorage if the disk is full; DataMissing if the
    node has no cache.
    """
    key = layer_key(software)
    if key in _refused:
        raise BadConfiguration(_refused[key])

    def build(directory: Path) -> None:
        pins = resolve(software, stopped)
        if pins:
            install = ("install", "--no-deps", "--target", str(directory), *pins)
            _call(software, install, stopped)

    try:
        return cached_directory(key, build)
    except BadConfiguration as error:
        _refused[key] = str(error)
        raise


def layer_if_made(software: str) -> Path | None:
    """Return the directory of a layer; None if it has not been made here."""
    directory = cache_root() / layer_key(software)
    return directory if directory.is_dir() else None


def layer_key(software: str) -> str:
    """Key of a layer in the node's cache: what was installed in it, for which packages below."""
    # Variables that say where pip and uv find packages.
    sources = {n: v for n, v in os.environ.items() if re.match(r"(PIP|UV)_\w*(INDEX|LINKS)", n)}
    content = (sorted(software.split()), sys.version, platform.machine(), _below(), sources)
    return f"software-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"


def layer_versions(directory: str | Path) -> dict[str, str]:
    """Versions in a layer by package."""
    distributions = metadata.distributions(path=[str(directory)])
    return {one.metadata["Name"]: one.version for one in distributions}


def path_with(layer: Path | None, paths: Sequence[str]) -> dict[str, str]:
    """Variables of a process that imports from a layer, if any, before ``paths``."""
    first = {} if layer is None else {VARIABLE: str(layer)}
    path = dict.fromkeys([*first.values(), *filter(None, paths)])
    return first | {"PYTHONPATH": os.pathsep.join(path)}


def resolve(software: str, stopped: Stopped = lambda: False) -> list[str]:
    """Return the packages of a layer as ``NAME==VERSION``, the named ones and what must change with
    them; raises as ``make_layer``."""
    if not _has_pip():
        printed = _call(software, ("install", "--dry-run", *software.split()), stopped)
        return _NEW.findall(printed)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        dry = ("install", "--dry-run", "--quiet", "--report", str(report), *software.split())
        _call(software, dry, stopped)
        changes = [one["metadata"] for one in json.loads(report.read_text("utf-8"))["install"]]
    return [f"{one['name']}=={one['version']}" for one in changes]


def available_versions(package: str, *, pre: bool = False) -> list[str]:
    """Versions of a package in the index or the directory of wheels, oldest first.

    Raises as ``make_layer``.
    """
    if not _has_pip():
        raise BadConfiguration("listing versions needs pip: uv pip install pip")
    printed = _call(package, ("index", "versions", package, *(["--pre"] if pre else [])))
    line = re.search(r"^Available versions: (.+)$", printed, re.MULTILINE)
    return line[1].replace(" ", "").split(",")[::-1] if line else []


@cache
def _below() -> list[str]:
    return sorted(f"{one.metadata['Name']}=={one.version}" for one in metadata.distributions())


def _has_pip() -> bool:
    return find_spec("pip") is not None


def _call(software: str, arguments: Sequence[str], stopped: Stopped = lambda: False) -> str:
    """Run pip, or uv, and return what it printed; raises as ``make_layer``."""
    if _has_pip():
        command = [sys.executable, "-P", "-m", "pip", "--no-input", "--disable-pip-version-check"]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "--no-progress", "--color=never"]
        arguments = (*arguments[:1], "--python", sys.executable, *arguments[1:])
    else:
        raise BadConfiguration(f"{software} cannot be installed: this node has neither pip nor uv")
    ends_at = time.monotonic() + LIMIT_S
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,  # so that compilers and build backends end with it
        )
        try:
            while process.poll() is None:
                if stopped():
                    raise ImportError(f"{software} was not installed: the worker was stopped")
                if time.monotonic() > ends_at:
                    raise ImportError(f"{software} was not installed within {LIMIT_S:.0f} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            end_group(process)
        printed.seek(0)
        text = printed.read().decode("utf-8", "replace")
    if process.returncode:
        raise _refusal(software, redact(text, os.environ))
    return text


def _refusal(software: str, text: str) -> Exception:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    complaints = [line for line in lines if line.lower().startswith(("error:", "cause:"))]
    errors = [line.partition(":")[2].strip() for line in complaints]
    reason = one_line(_OLDER.sub(r"\1…, ", "; ".join(errors or lines[-3:])), 1000)
    message = f"{software} cannot be installed: "
    if _FULL.search(text):
        return NodeStorage(message + reason)
    if causes := [line for line in lines if _TRANSIENT.search(line)]:
        return ImportError(f"{message}the index did not answer: {one_line(causes[-1], 1000)}")
    return BadConfiguration(message + reason)


def jobs_by_layer(jobs: Iterable[Job]) -> Counter[str]:
    """Count the jobs of each software beside the nodes' own."""
    return Counter(filter(None, (split_kind(job.process_kind)[1] for job in jobs)))


def layer_notes(jobs: Iterable[Job]) -> list[str]:
    """A line for each software of a plan's jobs."""
    return [
        f"software {name}, {plural(count, 'job')}: each node installs it once, over its own "
        f"packages, before the first of them"
        for name, count in jobs_by_layer(jobs).items()
    ]


def layer_findings(jobs: Iterable[Job]) -> Iterator[Finding]:
    """Findings of what pip would install here for each software of a grid's jobs."""
    for name in jobs_by_layer(jobs):
        try:
            packages = resolve(name)
        except Exception as error:
            remedy = "look at this node's pip configuration, and at what its packages allow"
            yield Finding("software", str(error), remedy, Level.ERROR, where="here")
        else:
            changes = ", ".join(packages) or "nothing, it is installed"
            text = f"{name} would install {changes}"
            yield Finding("software", text, "", Level.NOTE, where="here")
