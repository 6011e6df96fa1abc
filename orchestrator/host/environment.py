"""Provenance: the software, the host and the state of the source tree behind a row.

Versions come from package metadata, so nothing is imported for them; torch alone takes seconds.
Whatever is not there is left out: no git, no repository, no driver is a fact, not an error. A
driver that Ray unpacked from an upload has no repository; ``NIGHTGRID_GIT_COMMIT`` (and ``…_DIRTY``
= 0 or 1), set where it was submitted from, tells it.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from orchestrator.core.job import Accelerator
from orchestrator.results.derive import Provenance
from workloads.devices import all_devices
from workloads.engines import engine_packages
from workloads.models.rules import PACKAGES as READER_PACKAGES

GIT_COMMIT_VARIABLE = "NIGHTGRID_GIT_COMMIT"
GIT_DIRTY_VARIABLE = "NIGHTGRID_GIT_DIRTY"

#: Packages whose version may explain a difference between two rows, beside those of engines.
PACKAGES = (
    "torch",
    "peft",
    "ray",
    "datasets",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "torchao",
    "bitsandbytes",
    "deepspeed",
    "diffusers",
    "gguf",
    "optimum",
)

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """A commit, and whether the tree had changes that it does not hold. None: not known."""

    commit: str | None = None
    dirty: bool | None = None


def provenance() -> Provenance:
    """Provenance of the driver, as every row keeps it."""
    state = git_state()
    return Provenance(versions=versions(), git_commit=state.commit, git_dirty=state.dirty)


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    from orchestrator import __version__

    found = {
        "nightgrid": __version__,
        "python": platform.python_version(),
        "kernel": kernel(),
        "host": socket.gethostname(),
    }
    of_devices = (name for spec in all_devices() for name in spec.packages)
    for package in (*PACKAGES, *READER_PACKAGES, *engine_packages(), *of_devices):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    for spec in all_devices():
        found |= spec.versions()
    return tuple(found.items())


def versions() -> dict[str, str]:
    """Versions of this process's software and host, by name; what is not installed is left out."""
    return dict(_versions())


def git_state(directory: Path | None = None) -> GitState:
    """The state of the source tree that holds ``directory`` (default: this program's).

    The variables come first, since they are set by whoever had the repository. A repository that
    merely *contains* an installed copy (a virtual environment in somebody's project) is not ours
    and does not count.
    """
    commit = os.environ.get(GIT_COMMIT_VARIABLE, "")
    if _COMMIT.fullmatch(commit):
        dirty = {"0": False, "1": True}.get(os.environ.get(GIT_DIRTY_VARIABLE, ""))
        return GitState(commit=commit, dirty=dirty)
    directory = directory or Path(__file__).resolve().parent
    if _git(directory, "ls-files", "--error-unmatch", "--", ".") is None:
        return GitState()
    found = (_git(directory, "rev-parse", "HEAD") or "").strip()
    if not _COMMIT.fullmatch(found):
        return GitState()
    # The index is not refreshed, since several drivers may look at one tree.
    changes = _git(directory, "status", "--porcelain", "--untracked-files=normal", ":/")
    return GitState(commit=found, dirty=None if changes is None else bool(changes.strip()))


def _git(directory: Path, *arguments: str) -> str | None:
    return _output(
        ("git", "--no-optional-locks", "-C", str(directory), *arguments),
        # Asked by a hook, git would take the variables' repository for the directory's.
        {k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
    )


def driver_version(accelerator: Accelerator) -> str | None:
    """Version of the kernel driver of this kind of card; None if there is none here."""
    command = accelerator.spec.driver_command
    output = _output(command) if command else None
    lines = (output or "").split()
    return lines[0] if lines else None


def kernel() -> str:
    """The operating system and its version, e.g. ``Linux 6.8.0-45-generic``."""
    return f"{platform.system()} {platform.release()}"


def _output(command: tuple[str, ...], environment: dict[str, str] | None = None) -> str | None:
    """Output of a command; None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
