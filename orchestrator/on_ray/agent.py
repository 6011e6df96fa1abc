"""One agent on each node: the code of Nightgrid inside Ray's processes, and how it is placed.

An agent holds its node's cards in Ray's accounts, by a placement group with all of them. The work
is done by processes beneath it (``worker/node_workers.py``), which can crash, hang and be replaced
in a fraction of a second while the agent stays.

Ray ends the actors and placement groups of a driver that died, once it has noticed. A driver that
was only cut off from the results directory lives on and keeps its cards; so may one that hangs. So
names of actors and groups tell their driver, and the next driver of the run ends stale ones.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.core.errors import ControlStoreLost
from orchestrator.core.events import Progress
from orchestrator.core.job import Accelerator
from orchestrator.core.readings import Energy
from orchestrator.core.topology import Node
from orchestrator.on_ray.gcs import is_absence
from orchestrator.on_ray.outcomes import Durable, OutcomeKeeper
from orchestrator.util import output
from orchestrator.util.host import usable_cores
from orchestrator.util.redaction import redact
from orchestrator.worker.card_sampler import CardSampler
from orchestrator.worker.environment import threads_of_worker
from orchestrator.worker.node_workers import NodeWorkers
from orchestrator.worker.orphans import VARIABLE, Owner, end_orphans
from orchestrator.worker.protocol import (
    HostFacts,
    PendingResponses,
    Resequencer,
    Response,
    ResponseBatch,
    pickled,
    unpickled,
)
from orchestrator.worker.spawn import NodeSpawner, SharedSpawner, log_name
from workloads.devices import DeviceSpec, device_class
from workloads.devices.base import compiled_directory
from workloads.devices.monitor.host import CardTelemetry, idle_memory_bytes

#: Variables of Ray's workers: Ray runs them at niceness 15, which a benchmark would feel.
WORKER_VARIABLES = {"RAY_worker_niceness": "0"}
_LOOK_S = 1.0  # between two looks at what workers do
_TELEMETRY_S = 2.0
_SILENCE_S = 5.0


class NodeAgent:
    """Owns a node's workers and their spawner; when the agent goes, they all go.

    Ray runs ``submit`` in one thread, ``exchange`` in another, each ``job`` in one of as many as
    there are cards, and the rest in one more.
    """

    def __init__(self) -> None:
        self._spawner: NodeSpawner | None = None
        self._spawner_gone = threading.Event()
        self._sampler: CardSampler | None = None
        self._responses = PendingResponses()
        self._batches = Resequencer()
        self._posting = threading.Lock()
        self._outcomes = OutcomeKeeper(None)
        self._workers = NodeWorkers(self._respond, self._energy, self._readings)
        self._reported: Mapping[str, Progress] = {}
        self._look_at = self._read_at = 0.0  # monotonic: for progress, for telemetry

    def serve(
        self,
        address: str,
        kind: str,
        preload: Sequence[str],
        cards_on_host: int,
        log_dir: str | None,
        shared: SharedSpawner | None = None,
    ) -> HostFacts:
        """Have a spawner for the node's workers.

        Args:
            kind: of the cards, as grids name it.
            preload: modules that the spawner imports before it forks; none: each worker is a fresh
                interpreter.
            shared: a spawner of this host that was started for its nodes.

        Raises:
            OSError: no spawner can be started.
            TimeoutError: a process of an earlier driver of the run does not end, and may hold a
                card.
        """
        owner = Owner.of_this_process()
        if owner is not None:
            for orphan in end_orphans(owner):
                command = redact(orphan.command, os.environ)
                output.say(f"ended, of an earlier driver: {orphan.pid} {command}")
        self._outcomes = OutcomeKeeper(owner)
        session_logs = _ray_log_dir()
        logs = _writable(Path(log_dir), session_logs) if log_dir else session_logs
        accelerator = Accelerator(kind)
        threads = threads_of_worker(accelerator, cards_on_host)
        log = logs / log_name()
        self._spawner = NodeSpawner(preload, threads=threads, log=log, shared=shared)
        threading.Thread(target=self._watch, args=(self._spawner,), daemon=True).start()
        cards = _cards_held(accelerator)
        return HostFacts(
            hostname=socket.gethostname(),
            address=address,
            cores=len(usable_cores()),
            threads=threads,
            version=__version__,
            server=self._spawner.path,
            log_dir=str(logs),
            compiled=compiled_directory(device_class(accelerator.device).compiler()) or "",
            cards=cards,
            idle_memory_bytes=idle_memory_of(accelerator, cards),
        )

    def watch_cards(self, device: str) -> None:
        """Read this node's cards from now on, through the tools of their device."""
        self._sampler = CardSampler(device_class(device).telemetry)
        self._sampler.start()

    def submit(self, number: int, requests: bytes) -> None:
        """Take a batch of requests, pickled together, and its number."""
        with self._posting:
            for batch in self._batches.add(number, requests):
                for request in unpickled(batch):
                    if isinstance(request, Durable):
                        self._outcomes.durable(request.attempt_ids)
                    else:
                        self._outcomes.sent(request)
                        self._workers.do(request)

    def exchange(self, received: int, batch: tuple[int, bytes] | None = None) -> bytes:
        """Return a pickled ``ResponseBatch`` with all responses after the last that was received.

        Waits for news, a few seconds at most: silence would mean that the agent hangs. ``batch``
        has the arguments of ``submit``, if the driver has requests, too.
        """
        if batch is not None:
            self.submit(*batch)
        self._responses.acknowledge(received)
        deadline = time.monotonic() + _SILENCE_S
        while True:
            first, responses = self._responses.wait(_LOOK_S)
            progress, telemetry = self._look(), self._read_cards()
            gone = self._spawner_gone.is_set()
            changed = progress is not None and progress != self._reported
            if responses or changed or telemetry is not None or gone:
                break
            if time.monotonic() >= deadline:
                break
        if progress is not None:
            self._reported = progress
        return pickled(
            ResponseBatch(first, responses, self._batches.received, progress, telemetry, gone)
        )

    def job(self, worker_id: str, attempt_id: str) -> None:
        """Last as long as an attempt on a worker of this node: Ray lists the call, named like the
        job, among its tasks."""
        self._workers.wait_for_end(worker_id, attempt_id)

    def close(self) -> None:
        """Kill every worker of the node and its own spawner; returns when they are gone."""
        self._workers.close("its node is given back")
        if self._spawner is not None:
            self._spawner.close()
        self._outcomes.close()

    def _watch(self, spawner: NodeSpawner) -> None:
        spawner.wait()
        self._spawner_gone.set()
        self._responses.wake()

    def _respond(self, response: Response) -> None:
        self._outcomes.keep(response)
        self._responses.put(response)

    def _look(self) -> Mapping[str, Progress] | None:
        """Progress of the busy workers; None within a second of the last look."""
        now = time.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + _LOOK_S
        self._workers.look()
        return self._workers.progress()

    def _read_cards(self) -> Mapping[int, CardTelemetry] | None:
        """Latest telemetry of the cards; None on an emulated node, and between two readings."""
        now = time.monotonic()
        if self._sampler is None or now < self._read_at:
            return None
        self._read_at = now + _TELEMETRY_S
        return self._sampler.latest()

    def _energy(self, index: int, start: float, end: float) -> Energy | None:
        """Energy that a card took between two moments of this host's clock; None where unknown."""
        return self._sampler.energy(index, start, end) if self._sampler is not None else None

    def _readings(self, index: int, start: float, end: float) -> Mapping[str, str]:
        """Readings of a card between two moments of this host's clock."""
        return self._sampler.readings(index, start, end) if self._sampler is not None else {}


def _cards_held(kind: Accelerator) -> tuple[str, ...]:
    """The indices, as Ray words them, of the cards of this kind that this actor holds."""
    import ray

    ids = ray.get_runtime_context().get_accelerator_ids()
    return tuple(map(str, ids.get(kind.spec.ray_resource, ())))


def idle_memory_of(kind: Accelerator, cards: Sequence[str]) -> dict[int, int]:
    """Memory in use on each of these cards that is idle now, as far as it can be found out."""
    device = device_class(kind.device)
    idle_bytes = {}
    for index in (int(card) for card in cards if card.isdecimal()):
        use = device.use(index)
        idle = idle_memory_bytes(use) if use is not None else None
        if idle is not None:
            idle_bytes[index] = idle
    return idle_bytes


def _writable(directory: Path, otherwise: Path) -> Path:
    """The directory, made if need be; the other one where it cannot be, as on a full disk."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        output.say_aside(f"no directory for logs: {error}; they are in {otherwise}")
        return otherwise
    return directory


def _ray_log_dir() -> Path:
    """Directory of Ray's logs on this node: this very process's output goes there."""
    stdout = Path(os.readlink("/proc/self/fd/1")) if os.path.exists("/proc/self/fd/1") else Path()
    if stdout.is_file():
        return stdout.parent
    return Path(tempfile.mkdtemp(prefix="nightgrid-logs-"))


# ---------------------------------------------------------------- placing an agent


@dataclass(frozen=True, slots=True)
class PlacedAgent:
    """A placement group that holds a node's cards in Ray's accounts, and the call that starts its
    agent."""

    group: Any  # placement group with one bundle
    agent: Any
    serve: Any


def start_agent(
    run: str, node: Node, ray_node: Mapping[str, Any], serve: Sequence[Any]
) -> PlacedAgent | None:
    """Claim a node's free cards, and start the agent that holds them; None if none is free.

    Args:
        ray_node: the node as Ray describes it.
        serve: the arguments of ``NodeAgent.serve``.
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
    name = owned(f"{run} agent of {node.name} {time.monotonic_ns()}")
    agent = _agent_in(group, node.accelerator.spec, bundle, name)
    return PlacedAgent(group=group, agent=agent, serve=agent.serve.remote(*serve))


def end_agent(placed: PlacedAgent) -> None:
    """Free the cards, unless this process has left the cluster: its agents ended with it."""
    import ray
    from ray.util import remove_placement_group

    if not ray.is_initialized():
        return
    ray.kill(placed.agent)
    remove_placement_group(placed.group)


def _agent_in(group: Any, spec: DeviceSpec, bundle: Mapping[str, float], name: str) -> Any:
    """Start the agent of a node, which holds all cards of the bundle. What it starts can be told to
    be this driver's (``worker/orphans.py``)."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    cards = int(bundle[spec.ray_resource])
    owner = Owner.of_this_process()
    mark = {VARIABLE: str(owner)} if owner is not None else {}
    options: dict[str, Any] = {
        "num_cpus": 0,
        **spec.ray_request(cards),
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": {**WORKER_VARIABLES, **mark}},
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


# ---------------------------------------------------------------- stale actors


def owned(name: str) -> str:
    """The name of an actor or placement group; it identifies its driver."""
    owner = Owner.of_this_process()
    return f"{name} [{owner}]" if owner else name


def owner_in(name: str) -> Owner | None:
    """The driver that gave this name, if it is one of Nightgrid's."""
    _, bracket, mark = name.rpartition(" [")
    return Owner.of(mark[:-1]) if bracket and mark.endswith("]") else None


def end_stale_actors() -> list[str]:
    """Kill the actors and remove the placement groups of earlier drivers of this process's run;
    their names.

    Raises:
        ControlStoreLost: the GCS cannot be asked.
    """
    owner = Owner.of_this_process()
    if owner is None:
        return []
    try:
        return _end_actors_before(owner)
    except Exception as error:
        if not is_absence(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ControlStoreLost(f"the cluster's head went while it was joined: {reason}") from error


def _end_actors_before(owner: Owner) -> list[str]:
    import ray
    from ray._raylet import PlacementGroupID
    from ray.util import list_named_actors, placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    def is_stale(name: str) -> bool:
        driver = owner_in(name)
        return driver is not None and driver.precedes(owner)

    ended: list[str] = []
    for actor in list_named_actors(all_namespaces=True):
        if is_stale(actor["name"]):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
                ended.append(actor["name"])
    for group_id, group in placement_group_table().items():
        if is_stale(group["name"]) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
            ended.append(group["name"])
    return ended
