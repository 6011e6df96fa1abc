"""Start of a worker process: its configuration, its environment and its log. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.events import StartWorker
from orchestrator.core.topology import Node
from orchestrator.worker.acquisition import WorkerConfig
from orchestrator.worker.card_process import Launch
from orchestrator.worker.host_facts import HostFacts
from workloads.devices import CardProcess, environment_for
from workloads.engines import process_kinds, variables_of


def launch_of(
    command: StartWorker, node: Node, facts: HostFacts, factory: str, passed_on: Mapping[str, str]
) -> Launch:
    """The launch of the worker that the schedule asked for; ``passed_on`` are variables of the
    driver that its workers get as well."""
    card = command.card
    environments = {}
    shown = CardProcess(card_index=card.index, gang=command.gang)
    for kind in process_kinds(card.accelerator.device):
        environments[kind] = {
            **passed_on,
            **variables_of(kind),
            **environment_for(
                node.device,
                card.index,
                threads=facts.threads,
                kind=kind,
                cards=command.world_size,
                gang=command.gang,
                compiled=facts.compiled or None,
            ),
            **card.accelerator.spec.shown(shown),  # of an emulated card, too
        }
    config = WorkerConfig(
        worker_id=command.worker_id,
        card=card,
        node_name=node.name,
        emulated=node.emulated,
        emulated_device=node.emulated_device,
        memory_bytes=node.memory_bytes_per_card,
        idle_memory_bytes=facts.idle_memory_bytes.get(card.index),
        threads=facts.threads,
        rank=command.rank,
        local_rank=command.local_rank,
        world_size=command.world_size,
        passport=command.passport,
        environment=environments[command.kind],
        kind=command.kind,
    )
    name = f"{node.name}-{card.accelerator}{card.index}-{command.worker_id}"
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    return Launch(
        name=command.worker_id,
        server=facts.server,
        factory=factory,
        config=config,
        environments=environments,
        kind=command.kind,
        log=f"{facts.log_dir}/{safe}.log",
    )
