"""Packages of a host that decide which engines can run on its cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.topology import Node
from orchestrator.host.processors import usable_cores
from workloads.devices import device_spec
from workloads.devices.cpu import CORES
from workloads.engines import packages_on


def packages_here(device: str) -> tuple[tuple[str, str], ...]:
    """Versions of the packages that engines need on a device, and of the device's other software,
    on this very host. They come from package metadata: nothing is imported, no card is acquired."""
    from orchestrator.host.environment import versions  # a plan that asks nobody needs it not

    found = versions() | {CORES: str(len(usable_cores()))}
    spec = device_spec(device)
    names = (*packages_on(device), *spec.versions(), *([CORES] if spec.can("host_cores") else ()))
    return tuple((name, found[name]) for name in names if name in found)


def with_own_packages(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Nodes of this machine, with the packages of engines that it has."""
    return tuple(replace(node, packages=packages_here(node.device)) for node in nodes)
