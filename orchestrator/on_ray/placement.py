"""An agent on a node in Ray: a placement group with all of the node's free cards, and the actor."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.domain.topology import Node
from orchestrator.on_ray.actors import NodeAgent
from orchestrator.on_ray.bare_nodes import NICENESS, WORKERS, environment_of
from orchestrator.on_ray.predecessors import owned
from orchestrator.worker.leftovers import VARIABLE, Owner
from workloads.devices import DeviceSpec


@dataclass(frozen=True, slots=True)
class Opened:
    """A placement group that holds a node's cards in Ray's accounts, and the call that starts its
    agent."""

    group: Any  # placement group with one bundle
    agent: Any
    serve: Any


def start_agent(
    run: str, node: Node, ray_node: Mapping[str, Any], serve: Sequence[Any], *, plain: bool
) -> Opened | None:
    """Claim a node's free cards, and start the agent that holds them; None if none is free.

    Args:
        ray_node: the node as Ray describes it.
        serve: the arguments of the agent's method, but for its variables.
        plain: start it without variables of its own, for which Ray starts two interpreters one
            after the other instead of taking one that it has: it sets them itself, and raises its
            own priority.
    """
    from ray.util import placement_group

    ray_id = ray_node["NodeID"]
    bundle = _free_bundle(node, ray_id)
    if not bundle:
        return None
    group = placement_group(
        [bundle],
        strategy="STRICT_PACK",
        bundle_label_selector=[{"ray.io/node-id": ray_id}],
        name=owned(f"cards of {node.name} {time.monotonic_ns()}"),
    )
    name = f"{run} agent of {node.name} {time.monotonic_ns()}"
    variables = _variables()
    environment = {} if plain else environment_of(ray_node, {**WORKERS, **variables})
    agent = _agent_in(group, node.accelerator.spec, bundle, owned(name), environment)
    niceness = int(WORKERS[NICENESS]) if plain else None
    return Opened(group=group, agent=agent, serve=agent.serve.remote(*serve, variables, niceness))


def end_agent(opened: Opened) -> None:
    """Free the cards, unless this process has left the cluster: its agents ended with it."""
    import ray
    from ray.util import remove_placement_group

    if not ray.is_initialized():
        return
    ray.kill(opened.agent)
    remove_placement_group(opened.group)


def _variables() -> dict[str, str]:
    """Variables of an agent: the mark by which orphans of this driver are recognised."""
    owner = Owner.of_this_process()
    return {VARIABLE: str(owner)} if owner is not None else {}


def _agent_in(
    group: Any,
    spec: DeviceSpec,
    bundle: Mapping[str, float],
    name: str,
    environment: Mapping[str, Any],
) -> Any:
    """Start the agent of a node, which holds all cards of the bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    cards = int(bundle[spec.ray_resource])
    options: dict[str, Any] = {
        "num_cpus": 0,
        **spec.ray_request(cards),
        "max_restarts": 0,
        "max_task_retries": 0,
        **environment,
        "name": name,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
    }
    remote: Any = ray.remote  # whose types do not know groups
    agent = remote(concurrency_groups={"submit": 1, "exchange": 1, "jobs": cards})(NodeAgent)
    return agent.options(**options).remote()


def _free_bundle(node: Node, ray_id: str) -> dict[str, float]:
    """The cards of the node that Ray has free; empty when there are none."""
    from ray._private.state import available_resources_per_node

    spec = node.accelerator.spec
    free = int(available_resources_per_node().get(ray_id, {}).get(spec.ray_resource, 0))
    if not spec.ray_indices and free < len(node.card_indices):
        return {}
    return {spec.ray_resource: free} if free else {}
