"""Claiming nodes: all free cards of a node at once, an agent on it, and its card indices.

A node counts as joined when Ray has given us its cards, a probe has read their indices, and its
agent's process server listens. It has left when Ray says so, or when its agent or server died: then
every worker on it is gone too, and if the node itself lives, it is claimed anew.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.cluster import Node
from orchestrator.errors import ClusterError
from orchestrator.job import Accelerator
from orchestrator.on_ray.actors import CardActor, CardProbe, HostFacts, NodeAgent
from orchestrator.on_ray.calls import Calls
from orchestrator.on_ray.cluster import node_of, nodes_of
from orchestrator.on_ray.predecessors import owned
from orchestrator.worker.leftovers import VARIABLE, Owner

#: What a process on a node that computes on the CPU imports once, for all its workers.
PRELOAD = (
    "torch",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.glm.modeling_glm",
    "transformers.models.llama.modeling_llama",
    "orchestrator.worker.card_worker",
)
_CLAIM_PATIENCE_S = 60.0
_RETRY_S = 5.0


@dataclass(slots=True)
class Claim:
    """A node whose cards are ours, or are being claimed."""

    node: Node
    ray_node: Mapping[str, Any]
    group: Any  # placement group with one bundle
    agent: Any
    bundle: Mapping[str, float]
    since: float
    indices: tuple[int, ...] | None = None
    found: HostFacts | None = None
    joined: bool = False

    @property
    def facts(self) -> HostFacts:
        """What the agent found."""
        assert self.found is not None
        return self.found

    def in_bundle(self, cards: int) -> dict[str, Any]:
        """Actor options that take ``cards`` cards out of the claimed bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {
            "num_cpus": 0,
            "runtime_env": _runtime_env(),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, 0),
        }
        kind = self.node.accelerator
        if kind is Accelerator.GPU:
            options["num_gpus"] = cards
        elif kind is Accelerator.HPU:
            options["resources"] = {"HPU": cards}
        else:
            options["num_cpus"] = self.bundle["CPU"] * cards // len(self.node.card_indices)
        return options

    def card_actor(self, name: str) -> Any:
        """A new actor for one card, shown under ``name`` in the dashboard."""
        options = self.in_bundle(1) | {
            "name": owned(name),
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        # ``progress`` and ``stop`` are answered while ``start`` or ``run`` is busy.
        actor_class = _remote(CardActor, concurrency_groups={"control": 2})
        return actor_class.options(**options).remote()


class Claims:
    """The nodes claimed by one executor."""

    poll_interval_s = 1.0

    def __init__(
        self,
        *,
        accelerators: Collection[Accelerator] | None,
        log_dir: Path | None,
        preload: bool,
        clock: Callable[[], float],
        calls: Calls,
        joined: Callable[[Claim], None],
        left: Callable[[Claim, str], None],
    ) -> None:
        self._calls = calls
        self._joined = joined
        self._left = left
        self._accelerators = accelerators
        self._log_dir = log_dir
        self._preload = preload
        self._clock = clock
        self._claims: dict[str, Claim] = {}  # by node id
        self._retry_at: dict[str, float] = {}
        self._next_poll = 0.0
        self._empty_since = clock()
        self._trouble = ""  # why the last claim came to nothing

    def of(self, node_id: str) -> Claim | None:
        """The claim on a node that has joined and not left."""
        claim = self._claims.get(node_id)
        return claim if claim is not None and claim.joined else None

    def joined(self) -> list[Claim]:
        """The claims on all nodes that have joined and not left."""
        return [claim for claim in self._claims.values() if claim.joined]

    def poll(self) -> None:
        """Compare Ray's list of nodes with ours, at most once a second.

        Raises:
            ClusterError: not one node could be claimed for a minute.
        """
        import ray

        now = self._clock()
        if now < self._next_poll:
            return
        self._next_poll = now + self.poll_interval_s
        ray_nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for node_id, claim in list(self._claims.items()):
            if node_id not in ray_nodes:
                self._drop(claim, "Ray declared it dead")
            elif not claim.joined and now - claim.since > _CLAIM_PATIENCE_S:
                self._trouble = f"the cards of {claim.node.name} are in use by others"
                self._drop(claim, self._trouble)
        wanted = [
            node
            for node in nodes_of(ray_nodes.values())
            if self._accelerators is None or node.accelerator in self._accelerators
        ]
        for node in wanted:
            if node.node_id not in self._claims and self._retry_at.get(node.node_id, 0) <= now:
                cards_here = _cards_on_host(ray_nodes[node.node_id], wanted, ray_nodes)
                self._claim(node, ray_nodes[node.node_id], cards_here)
        if self.joined():
            self._empty_since = now
        elif now - self._empty_since > _CLAIM_PATIENCE_S + _RETRY_S:
            kinds = "/".join(sorted(map(str, self._accelerators or Accelerator)))
            why = self._trouble or f"the cluster has no node with {kinds}"
            raise ClusterError(f"no card could be had for {_CLAIM_PATIENCE_S:.0f} s: {why}")

    def close(self) -> None:
        """End every worker on every node and give the cards back."""
        import ray
        from ray.util import remove_placement_group

        closing = [claim.agent.close.remote() for claim in self._claims.values()]
        with contextlib.suppress(Exception):
            ray.wait(closing, num_returns=len(closing), timeout=15) if closing else None
        for claim in self._claims.values():
            ray.kill(claim.agent)
            remove_placement_group(claim.group)
        self._claims.clear()

    # ------------------------------------------------------------ one node

    def _claim(self, node: Node, ray_node: Mapping[str, Any], cards_on_host: int) -> None:
        """Ask for the node's free cards and start its agent; the answers come as calls end."""
        bundle = _free_bundle(node)
        if not bundle:
            self._trouble = f"{node.name} has no free {node.accelerator} card"
            self._retry_at[node.node_id] = self._clock() + _RETRY_S
            return
        from ray.util import placement_group

        here = [{"ray.io/node-id": node.node_id}]
        claim = Claim(
            node=node,
            ray_node=ray_node,
            group=placement_group(
                [bundle],
                strategy="STRICT_PACK",
                bundle_label_selector=here,
                name=owned(f"cards of {node.name} {time.monotonic_ns()}"),
            ),
            agent=_agent_on(node),
            bundle=bundle,
            since=self._clock(),
        )
        self._claims[node.node_id] = claim
        serve = claim.agent.serve.remote(
            str(ray_node["NodeManagerAddress"]),
            PRELOAD if self._preload and _computes_on_cpu(node) else (),
            cards_on_host,
            str(self._log_dir.resolve()) if self._log_dir else None,
        )
        self._calls.add(serve, lambda value: self._facts_came(claim, value))
        if node.accelerator is Accelerator.CPU:
            claim.indices = node.card_indices
            return
        probe = _remote(CardProbe).options(**claim.in_bundle(int(_cards_in(bundle)))).remote()
        read = probe.indices.remote(node.accelerator.value)
        self._calls.add(read, lambda value: self._indices_came(claim, probe, value))

    def _facts_came(self, claim: Claim, value: Any) -> None:
        if isinstance(value, Exception):
            self._failed(claim, "the agent cannot start", value)
        elif value.version != __version__:
            self._failed(claim, "Nightgrid is", ValueError(f"{value.version}, not {__version__}"))
        else:
            claim.found = value
            lost = "its agent or process server died"
            self._calls.add(claim.agent.watch.remote(), lambda _: self._drop(claim, lost))
            if not claim.node.emulated:  # an emulated card has no sensors
                claim.agent.watch_cards.remote(claim.node.accelerator.device)
            self._join(claim)

    def _indices_came(self, claim: Claim, probe: Any, value: Any) -> None:
        import ray

        ray.kill(probe)  # only now can workers have the cards
        try:
            if isinstance(value, Exception):
                raise value
            claim.indices = tuple(sorted(int(index) for index in value))
        except Exception as error:
            self._failed(claim, "cannot read which cards are ours", error)
            return
        self._join(claim)

    def _join(self, claim: Claim) -> None:
        """Count the node as joined once both answers are there."""
        current = self._claims.get(claim.node.node_id) is claim
        if not current or claim.joined or claim.found is None or claim.indices is None:
            return
        node = claim.node
        claim.node = node_of(claim.ray_node, node.name, node.accelerator, claim.indices)
        claim.joined = True
        self._joined(claim)

    def _failed(self, claim: Claim, what: str, error: Exception) -> None:
        trouble = f"{claim.node.name}: {what}: {' '.join(str(error).split())[:500]}"
        if trouble != self._trouble:
            logging.getLogger(__name__).warning("node left out: %s", trouble)
        self._trouble = trouble
        self._drop(claim, trouble)

    def _drop(self, claim: Claim, reason: str) -> None:
        """Forget a claim; if its node is still there, it is claimed anew after a while."""
        import ray
        from ray.util import remove_placement_group

        if self._claims.get(claim.node.node_id) is not claim:
            return
        was_joined, claim.joined = claim.joined, False
        del self._claims[claim.node.node_id]
        self._retry_at[claim.node.node_id] = self._clock() + _RETRY_S
        if was_joined:
            self._left(claim, reason)
        ray.kill(claim.agent)
        remove_placement_group(claim.group)


def _runtime_env() -> dict[str, Any]:
    """Ray runs its workers at niceness 15, which a benchmark would feel. What they start can be
    told to be this driver's (``worker/leftovers.py``)."""
    variables = {"RAY_worker_niceness": "0"}
    if owner := Owner.of_this_process():
        variables[VARIABLE] = str(owner)
    return {"env_vars": variables}


def _agent_on(node: Node) -> Any:
    """Start the agent of a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_concurrency": 8,
        "max_restarts": 0,
        "runtime_env": _runtime_env(),
        "name": owned(f"agent {node.name} {time.monotonic_ns()}"),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
    }
    return _remote(NodeAgent).options(**options).remote()


def _remote(actor_class: type, **options: Any) -> Any:
    """The class as a Ray actor class, which Ray's own types describe poorly."""
    import ray

    decorate: Any = ray.remote(**options) if options else ray.remote
    return decorate(actor_class)


def _computes_on_cpu(node: Node) -> bool:
    return node.device == Accelerator.CPU.device


def _cards_on_host(
    ray_node: Mapping[str, Any], nodes: Collection[Node], ray_nodes: Mapping[str, Any]
) -> int:
    """How many cards share the cores of this node's host: emulated nodes share one host."""
    address = ray_node["NodeManagerAddress"]
    here = [n for n in nodes if ray_nodes[n.node_id]["NodeManagerAddress"] == address]
    return sum(node.server_cards for node in here)


def _free_bundle(node: Node) -> dict[str, float]:
    """The cards of the node that Ray has free; empty when there are none."""
    from ray._private.state import available_resources_per_node

    kind = node.accelerator.value
    free = int(available_resources_per_node().get(node.node_id, {}).get(kind, 0))
    if kind == Accelerator.CPU.value and free < len(node.card_indices):
        return {}
    return {kind: free} if free else {}


def _cards_in(bundle: Mapping[str, float]) -> float:
    return next(iter(bundle.values()))
