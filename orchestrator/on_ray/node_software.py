"""Packages of a cluster's nodes, asked of the nodes themselves: which engine runs hangs on them.

Only nodes with a kind of card that has engines of its own are asked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator.domain.topology import Node
from orchestrator.host.node_packages import packages_here
from workloads.devices import host_device
from workloads.engines import choice_packages

#: For all nodes together: starting a process takes seconds, on a cold disk more.
_PATIENCE_S = 60.0


def with_packages(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes, those worth asking with their packages. A node that does not answer stays as it
    is, with a warning: whoever plans for it assumes what its image should have."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked: dict[Any, Node] = {}
    for node in nodes:
        processor = node.emulated and node.device == host_device().name  # it has no choice
        if choice_packages(node.device) and not processor:
            strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            task: Any = ray.remote(num_cpus=0, max_retries=0)(packages_here)
            asked[task.options(scheduling_strategy=strategy).remote(node.device)] = node
    if not asked:
        return tuple(nodes)
    done, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_PATIENCE_S)
    known: dict[str, tuple[tuple[str, str], ...]] = {}
    for call in [*done, *silent]:
        node = asked[call]
        try:
            known[node.node_id] = ray.get(call, timeout=0)
        except Exception as error:
            logging.getLogger(__name__).warning(
                "node %s did not say which packages it has: %s", node.name, error
            )
    return tuple(
        replace(node, packages=known[node.node_id]) if node.node_id in known else node
        for node in nodes
    )
