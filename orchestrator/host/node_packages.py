"""Packages of a host that decide which engine runs a job on its cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.domain.topology import Node
from workloads.engines import choice_packages


def packages_here(device: str) -> tuple[tuple[str, str], ...]:
    """Versions of the packages that decide about engines on a device, on this very host. They come
    from package metadata: nothing is imported, no card is acquired."""
    from orchestrator.host.environment import versions  # a plan that asks nobody needs it not

    found = versions()
    return tuple((name, found[name]) for name in choice_packages(device) if name in found)


def with_own_packages(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Nodes of this machine that a card's own software drives, with its packages."""
    return tuple(
        replace(node, packages=packages_here(node.device)) if choice_packages(node.device) else node
        for node in nodes
    )
