"""The environment of workers: provenance of a row, threads, variables and logs.

Versions come from package metadata, without imports. Missing git, repository or driver is no error.
A driver unpacked from an upload has no repository; the submitter sets ``NIGHTGRID_GIT_COMMIT`` (and
``…_DIRTY`` = 0 or 1).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from orchestrator import __version__
from orchestrator.analysis.measurement import Provenance
from orchestrator.core.errors import ClusterError
from orchestrator.core.events import StartWorker
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Node
from orchestrator.util.host import host_problems, usable_cores
from orchestrator.worker.layers import VARIABLE as LAYER
from orchestrator.worker.layers import layer_versions
from orchestrator.worker.protocol import HostFacts, Start, WorkerConfig
from workloads.devices import (
    CardProcess,
    all_devices,
    device_class,
    device_spec,
    environment_for,
)
from workloads.devices.cpu import CORES
from workloads.engines import (
    engine_packages,
    packages_on,
    process_kinds,
    split_kind,
    variables_of,
)
from workloads.models.rules import PACKAGES as READER_PACKAGES
from workloads.packages import packages_of_jobs

GIT_COMMIT_VARIABLE = "NIGHTGRID_GIT_COMMIT"
GIT_DIRTY_VARIABLE = "NIGHTGRID_GIT_DIRTY"

#: Packages whose version may explain a difference between two rows, beside those of engines.
PACKAGES = (
    *("torch", "peft", "ray", "datasets", "accelerate", "tokenizers", "safetensors", "numpy"),
    *("pyarrow", "torchao", "bitsandbytes", "deepspeed", "diffusers", "gguf", "optimum"),
)

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
TIMEOUT_S = 10.0


def provenance() -> Provenance:
    """Provenance of the driver, as every row keeps it."""
    commit, dirty = git_state()
    return Provenance(versions=versions(), git_commit=commit, git_dirty=dirty)


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of this process's software and host, by name; what is not installed is left out."""
    known = {
        "nightgrid": __version__,
        "python": platform.python_version(),
        "kernel": kernel(),
        "host": socket.gethostname(),
    }
    of_devices = (name for spec in all_devices() for name in spec.packages)
    for package in (*PACKAGES, *READER_PACKAGES, *engine_packages(), *of_devices):
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[package] = metadata.version(package)
    for spec in all_devices():
        known |= spec.versions()
    if layer := os.environ.get(LAYER):
        known |= layer_versions(layer)
    return known


def git_state(directory: Path | None = None) -> tuple[str | None, bool | None]:
    """The commit, and whether there are changes that it does not hold (None: not known), from the
    variables, else of the tree that tracks ``directory`` (default: ours)."""
    commit = os.environ.get(GIT_COMMIT_VARIABLE, "")
    if _COMMIT.fullmatch(commit):
        return commit, {"0": False, "1": True}.get(os.environ.get(GIT_DIRTY_VARIABLE, ""))
    directory = directory or Path(__file__).resolve().parent
    # A repository that merely contains a virtual environment does not count.
    if _git(directory, "ls-files", "--error-unmatch", "--", ".") is None:
        return None, None
    commit = (_git(directory, "rev-parse", "HEAD") or "").strip()
    if not _COMMIT.fullmatch(commit):
        return None, None
    # The index is not refreshed, since several drivers may look at one tree.
    changes = _git(directory, "status", "--porcelain", "--untracked-files=normal", ":/")
    return commit, None if changes is None else bool(changes.strip())


def _git(directory: Path, *arguments: str) -> str | None:
    return _output(
        ("git", "--no-optional-locks", "-C", str(directory), *arguments),
        # In a git hook, these variables name another repository.
        {k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
    )


def driver_version(accelerator: Accelerator) -> str | None:
    """Version of the kernel driver of this kind of card; None if there is none here."""
    command = accelerator.spec.driver_command
    words = ((_output(command) if command else None) or "").split()
    return words[0] if words else None


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


# ---------------------------------------------------------------- packages that engines need


def packages_here(device: str) -> tuple[tuple[str, str], ...]:
    """Versions of a device's engine packages and software on this host, and of the packages of
    single jobs, where an empty version says that one is absent. Imports nothing."""
    known = versions() | {CORES: str(len(usable_cores()))}
    spec = device_spec(device)
    names = (*packages_on(device), *spec.versions(), *([CORES] if spec.can("host_cores") else ()))
    of_engines = tuple((name, known[name]) for name in names if name in known)
    return (*of_engines, *(pair for pair in packages_of_jobs() if pair[0] not in names))


def with_own_packages(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Nodes of this machine, with the packages of engines that it has."""
    return tuple(replace(node, packages=packages_here(node.device)) for node in nodes)


def lost_cards(accelerator: str) -> tuple[str, ...]:
    """This host's cards of a kind that the vendor's tool reports as lost, each with the reason."""
    readings = device_class(Accelerator(accelerator).device).telemetry()
    return tuple(
        f"{accelerator}{index} is left out: {card.lost}"
        for index, card in sorted(readings.items())
        if card.lost
    )


def node_here(device: str, accelerator: str) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Packages of this node, and the faults of its host."""
    return packages_here(device), (*lost_cards(accelerator), *host_problems())


# ---------------------------------------------------------------- threads of workers

#: Threads of each worker, set in the environment of the node's Ray.
THREADS = "NIGHTGRID_THREADS"


def threads_of_worker(kind: Accelerator, cards_on_host: int) -> int:
    """OpenMP threads per worker: ``configured_threads``, else an even share of unspared cores."""
    cores = len(usable_cores()) - kind.spec.spare_cores
    return configured_threads() or max(1, cores // cards_on_host)


def threads_of_nodes(nodes: Sequence[Node]) -> int | None:
    """``threads_of_worker`` for nodes that share this host; None if none computes on it."""
    here = [node for node in nodes if node.computes_on_host]
    if not here:
        return None
    return threads_of_worker(here[0].accelerator, sum(node.server_cards for node in nodes))


def configured_threads() -> int | None:
    """Return the value of ``THREADS``, None if unset; ClusterError unless it is an integer > 0."""
    text = os.environ.get(THREADS, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ClusterError(
            f"{THREADS}={text!r} is not a number of threads; give a whole number from 1 up, or "
            "unset it for an even share of the cores"
        )
    return int(text)


# ---------------------------------------------------------------- the start of a worker


def start_request(
    command: StartWorker, node: Node, facts: HostFacts, factory: str, passed_on: Mapping[str, str]
) -> Start:
    """Build the Start request of a worker, with the driver's ``passed_on`` variables."""
    card = command.card
    shown = CardProcess(card_index=card.index, gang=command.gang, uuids=facts.uuids)
    environments = {
        kind: {
            **passed_on,
            **variables_of(kind),
            **environment_for(
                node.device,
                card.index,
                threads=facts.threads,
                kind=kind,
                cards=command.world_size,
                gang=command.gang,
                uuids=facts.uuids,
                compiled=facts.compiled or None,
            ),
            **card.accelerator.spec.shown(shown),  # of an emulated card, too
        }
        for kind in process_kinds(card.accelerator.device)
    }
    config = WorkerConfig(
        worker_id=command.worker_id,
        card=card,
        node_name=node.name,
        emulated=node.emulated,
        emulated_device=node.emulated_device,
        memory_bytes=node.memory_bytes_per_card,
        idle_memory_bytes=facts.idle_memory_bytes.get(card.index),
        uuid=facts.uuids.get(card.index, ""),
        lost_cards=facts.lost_cards,
        threads=facts.threads,
        world_size=command.world_size,
        check_card=command.check_card,
        environment=environments[split_kind(command.kind)[0]],
        kind=command.kind,
    )
    name = f"{node.name}-{card.accelerator}{card.index}-{command.worker_id}"
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    return Start(
        worker_id=command.worker_id,
        server=facts.server,
        factory=factory,
        config=config,
        environments=environments,
        log=f"{facts.log_dir}/{safe}.log",
    )
