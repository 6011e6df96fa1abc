"""Packages of a host that decide which engines can run on its cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.domain.topology import Node
from workloads.devices import device_spec
from workloads.engines import packages_on


def packages_here(device: str) -> tuple[tuple[str, str], ...]:
    """Versions of the packages that engines need on a device, and of the device's other software,
    on this very host. They come from package metadata: nothing is imported, no card is acquired."""
    from orchestrator.host.environment import versions  # a plan that asks nobody needs it not

    found = versions()
    names = (*packages_on(device), *device_spec(device).versions())
    return tuple((name, found[name]) for name in names if name in found)


def with_own_packages(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Nodes of this machine, with the packages of engines that it has."""
    return tuple(replace(node, packages=packages_here(node.device)) for node in nodes)
