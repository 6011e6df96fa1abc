"""The agent of a node, a Ray actor, and its placement.

A placement group holds its node's cards. Processes beneath the agent do the work
(``worker/node_workers.py``), so they can crash, hang and be replaced while it stays. Ray ends the
actors and groups of dead drivers, but not of one that hangs or was cut off from the results: their
names identify the driver, and the run's next driver ends stale ones.
"""

from __future__ import annotations

import contextlib
import os
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
from orchestrator.core.topology import Node
from orchestrator.on_ray.gcs import is_absence
from orchestrator.on_ray.job_tasks import task_on_cards
from orchestrator.on_ray.outcomes import OutcomeKeeper
from orchestrator.util import output
from orchestrator.util.redaction import error_line, redact
from orchestrator.worker import protocol
from orchestrator.worker.environment import lost_cards, threads_of_worker
from orchestrator.worker.node_workers import CardSampler, NodeWorkers
from orchestrator.worker.orphans import VARIABLE, Owner, end_orphans, make_private_directory
from orchestrator.worker.spawn import OwnSpawner, SharedSpawner, log_name, wait_for_end
from workloads.base import BadConfiguration
from workloads.devices import device_class, shown_cards
from workloads.devices.base import compiled_directory
from workloads.devices.monitor.host import CardTelemetry, idle_memory_bytes

#: Variables of Ray's workers: Ray runs them at niceness 15, which a benchmark would feel.
WORKER_VARIABLES = {"RAY_worker_niceness": "0"}
_LOOK_S = 1.0  # between two looks at what workers do
_TELEMETRY_S = 2.0
_SILENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of an agent."""

    accelerator: Accelerator
    preload: Sequence[str]  # modules to import before forking workers; none: fresh interpreters
    cards_on_host: int  # that share the host's cores
    log_dir: str | None = None  # where workers log; None: beside Ray's logs
    shared: SharedSpawner | None = None  # of this host, started for its nodes
    watched: bool = False  # whether the cards have sensors; emulated ones have none


class NodeAgent:
    """Owns a node's workers and their spawner, which end with it.

    Ray runs ``submit``, ``exchange`` and the rest in one thread each, ``job`` in one per card.
    """

    def __init__(self) -> None:
        self._spawner: OwnSpawner | None = None  # unless it shares one
        self._spawner_gone = threading.Event()
        self._requests = protocol.Inbox[protocol.Request]()
        self._responses = protocol.Outbox[protocol.Response]()
        self._outcomes = OutcomeKeeper(None)
        self._workers = NodeWorkers(self._respond)
        self._reported: Mapping[str, Progress] = {}
        self._look_at = self._read_at = 0.0  # monotonic: for progress, for telemetry

    def serve(self, settings: AgentSettings, ids: Sequence[str]) -> protocol.HostFacts:
        """End orphans of earlier drivers, start the spawner and sampler, and describe the host, for
        the cards of these ids in Ray.

        Raises OSError if no spawner starts, TimeoutError if an orphan (with its card) stays.
        """
        owner = Owner.of_this_process()
        if owner is not None:
            for pid, command in end_orphans(owner).items():
                shown = redact(command, os.environ)
                output.say(f"ended, of an earlier driver: {pid} {shown}")
        self._outcomes = OutcomeKeeper(owner)
        logs = _log_directory(settings.log_dir)
        accelerator = settings.accelerator
        device = device_class(accelerator.device)
        threads = threads_of_worker(accelerator, settings.cards_on_host)
        spawner = settings.shared
        if spawner is None or not spawner.serves(threads):
            self._spawner = OwnSpawner(settings.preload, threads=threads, log=logs / log_name())
            spawner = self._spawner.shared
        threading.Thread(target=self._watch, args=(spawner.path,), daemon=True).start()
        cards, left_out, lost = tuple(ids), tuple[str, ...](), tuple[str, ...]()
        if settings.watched:
            self._workers.sampler = CardSampler(device.telemetry)
            self._workers.sampler.start()
            cards, left_out = usable_cards(accelerator, ids)
            lost = lost_cards(accelerator)
        return protocol.HostFacts(
            threads=threads,
            version=__version__,
            server=spawner.path,
            log_dir=str(logs),
            compiled=compiled_directory(device.compiler()) or "",
            cards=cards,
            cards_left_out=left_out,
            lost_cards=lost,
            # CUDA may count the cards behind a lost one anew. Elsewhere indices do: vLLM, for one,
            # reads numbers, and a card in MIG mode has parts with UUIDs of their own.
            uuids=device.uuids() if lost else {},
            idle_memory_bytes=idle_memory_of(accelerator, cards),
        )

    def submit(self, first: int, requests: Sequence[protocol.Request]) -> None:
        """Take requests, numbered from ``first``."""
        for request in self._requests.new(first, requests):
            if isinstance(request, protocol.Durable):
                self._outcomes.durable(request.attempt_ids)
            else:
                self._workers.do(request)

    def exchange(self, received: int) -> protocol.ResponseBatch:
        """Return responses after number ``received``; waits for news for ``_SILENCE_S`` at most."""
        self._responses.confirm(received)
        deadline = time.monotonic() + _SILENCE_S
        while True:
            first, responses = self._responses.pending(_LOOK_S)
            now = time.monotonic()
            progress: Mapping[str, Progress] | None = None  # None: not looked at again
            telemetry: Mapping[int, CardTelemetry] | None = None
            if now >= self._look_at:
                self._look_at = now + _LOOK_S
                self._workers.look()
                progress = self._workers.progress()
            if self._workers.sampler is not None and now >= self._read_at:
                self._read_at = now + _TELEMETRY_S
                telemetry = self._workers.sampler.latest()
            gone = self._spawner_gone.is_set()
            changed = progress is not None and progress != self._reported
            news = responses or changed or telemetry is not None or gone
            if news or now >= deadline:
                break
        if progress is not None:
            self._reported = progress
        return protocol.ResponseBatch(
            first, responses, self._requests.received, progress, telemetry, gone
        )

    def job(self, worker_id: str, attempt_id: str) -> None:
        """Block until an attempt ends: called by the Ray task of its job."""
        self._workers.wait_for_end(worker_id, attempt_id)

    def close(self) -> None:
        """Kill every worker of the node and its own spawner; returns when they are gone."""
        self._workers.close("its node is given back")
        if self._spawner is not None:
            self._spawner.close()
        self._outcomes.close()

    def _watch(self, spawner: str) -> None:
        wait_for_end(spawner)
        self._spawner_gone.set()

    def _respond(self, response: protocol.Response, request: protocol.Run | None = None) -> None:
        if request is not None and isinstance(response, protocol.Ended):
            self._outcomes.keep(request, response)
        self._responses.put(response)


def usable_cards(kind: Accelerator, ids: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Resolve Ray's ids of cards to indices that the vendor's tool has, and say which are left out.

    Ray may count cards that are named otherwise (Gaudi's modules 4 to 7 in a container), have more
    of them than are here, or know them by UUID.
    """
    device = device_class(kind.device)
    readings = device.telemetry()
    if not readings:  # no tool: a worker will see
        return tuple(ids), ()
    numbers = {int(name) for name in ids if name.isdecimal()}
    counted = len(numbers) == len(ids) and max(numbers, default=0) < len(readings)
    if counted and (len(ids) == len(readings) or not numbers & readings.keys()):
        here = sorted(readings)
        ids = [str(here[number]) for number in sorted(numbers)]
    cards, left_out = [], []
    for name in ids:
        try:
            [index] = shown_cards("the card", name, readings, device.uuids)
        except BadConfiguration as error:
            left_out.append(str(error))
            continue
        if lost := readings[index].lost:
            left_out.append(f"{kind}{index}: {lost}")
        else:
            cards.append(str(index))
    return tuple(cards), tuple(left_out)


def idle_memory_of(kind: Accelerator, cards: Sequence[str]) -> dict[int, int]:
    """Memory in use, by index, on those of these cards that are known to be idle."""
    device = device_class(kind.device)
    idle_bytes = {}
    for index in (int(card) for card in cards if card.isdecimal()):
        use = device.use(index)
        idle = idle_memory_bytes(use) if use is not None else None
        if idle is not None:
            idle_bytes[index] = idle
    return idle_bytes


def _log_directory(named: str | None) -> Path:
    """Return the named directory, created if absent; if that fails, the one of Ray's logs."""
    if named is not None:
        try:
            Path(named).mkdir(parents=True, exist_ok=True)
            return Path(named)
        except OSError as error:
            output.say_aside(f"no directory for logs: {error}; they are beside Ray's")
    stdout = Path(os.path.realpath("/proc/self/fd/1"))
    if stdout.is_file():
        return stdout.parent
    return make_private_directory(os.environ.get(VARIABLE, "")).path


# ---------------------------------------------------------------- placing an agent


@dataclass(frozen=True, slots=True)
class PlacedAgent:
    """A placement group that holds a node's cards in Ray's accounts, and the node's agent."""

    group: Any  # placement group with one bundle
    agent: Any
    facts: Any  # the call that will give its ``HostFacts``


def start_agent(run: str, node: Node, ray_id: str, settings: AgentSettings) -> PlacedAgent | None:
    """Claim a Ray node's free cards and start an agent for them, with this driver's mark
    (``worker/orphans.py``); None if none is free."""
    import ray
    from ray._private.state import available_resources_per_node
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    spec = node.accelerator.spec
    free = int(available_resources_per_node().get(ray_id, {}).get(spec.ray_resource, 0))
    if not free or (not spec.ray_indices and free < len(node.card_indices)):
        return None
    bundle = {spec.ray_resource: float(free)}
    group = placement_group(
        [bundle],
        strategy="STRICT_PACK",
        bundle_label_selector=[{"ray.io/node-id": ray_id}],
        name=owned(f"cards of {node.name} {time.monotonic_ns()}"),
    )
    owner = Owner.of_this_process()
    mark = {VARIABLE: str(owner)} if owner is not None else {}
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": {**WORKER_VARIABLES, **mark}},
        "name": owned(f"{run} agent of {node.name} {time.monotonic_ns()}"),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
    }
    remote: Any = ray.remote  # its types lack concurrency groups
    kind = remote(concurrency_groups={"submit": 1, "exchange": 1, "jobs": free})(NodeAgent)
    agent = kind.options(**options).remote()
    ids = task_on_cards(group, spec, free, f"cards of {node.name}")
    return PlacedAgent(group=group, agent=agent, facts=agent.serve.remote(settings, ids))


def end_agent(placed: PlacedAgent) -> None:
    """Kill the agent and free its cards; does nothing after leaving the cluster."""
    import ray
    from ray.util import remove_placement_group

    if not ray.is_initialized():
        return
    ray.kill(placed.agent)
    remove_placement_group(placed.group)


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
    """End actors and groups of earlier drivers, return names; may raise ControlStoreLost."""
    import ray
    from ray._raylet import PlacementGroupID
    from ray.util import list_named_actors, placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    owner, ended = Owner.of_this_process(), list[str]()
    if owner is None:
        return ended

    def is_stale(name: str) -> bool:
        driver = owner_in(name)
        return driver is not None and driver.precedes(owner)

    try:
        for actor in list_named_actors(all_namespaces=True):
            if is_stale(actor["name"]):
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
                    ended.append(actor["name"])
        for group_id, group in placement_group_table().items():
            if is_stale(group["name"]) and group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
                ended.append(group["name"])
    except Exception as error:
        if not is_absence(error):
            raise
        reason = error_line(error, 200)
        raise ControlStoreLost(f"the cluster's head went while it was joined: {reason}") from error
    return ended
