"""Sessions: this process, emulated or real cards of this machine, or a Ray cluster.

A session knows its nodes before anything starts if possible, so that a plan can be refused first;
``executor`` starts what is needed and ends it with the block.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import ClusterError
from orchestrator.core.events import Executor
from orchestrator.core.job import Accelerator, Job, default_accelerator
from orchestrator.core.status import RunStatus
from orchestrator.core.topology import Node, parse_emulation
from orchestrator.driver.local import InProcessExecutor
from orchestrator.driver.plan import no_cards_text, own_nodes
from orchestrator.on_ray.cluster import WAYS, connect, described, local_address
from orchestrator.on_ray.executor import RayExecutor
from orchestrator.on_ray.local_cluster import emulate
from orchestrator.on_ray.metrics import Publisher
from orchestrator.on_ray.outcomes import KeptOutcome, kept_outcomes
from orchestrator.on_ray.run_queue import QueueOptions, RunQueue
from orchestrator.worker.environment import threads_of_nodes, with_own_packages
from orchestrator.worker.memory_limit import share_of_host
from orchestrator.worker.orphans import Owner
from orchestrator.worker.spawn import PRELOAD, OwnSpawner, log_name

LabelOf = Callable[[Job], str]
#: Opens an executor by run name, log directory, modules to preload in forked workers, job labels.
OpenExecutor = Callable[
    [str, Path, Sequence[str], LabelOf], contextlib.AbstractContextManager[Executor]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Cards to run on; ``description`` is shown to the user."""

    description: str
    nodes: tuple[Node, ...]
    executor: OpenExecutor
    publish: Callable[[RunStatus], object] = lambda _: None  # to the cluster's monitoring
    address: str = ""  # of a cluster that others keep running
    look: Callable[[], tuple[Node, ...]] | None = None  # what its nodes are now
    #: The outcomes that its nodes kept of a run of this id.
    kept_outcomes: Callable[[str], Iterable[KeptOutcome]] = lambda run_id: ()
    #: The nodes with their packages, where an engine is chosen by them, and faults of their hosts.
    described: Callable[[Sequence[Node]], tuple[Node, ...]] = tuple


def with_memory(nodes: Sequence[Node], card_memory_bytes: int | None = None) -> tuple[Node, ...]:
    """Limit the memory of emulated cards (default: equal shares), for searches of batch sizes."""
    cards = sum(len(node.card_indices) for node in nodes)
    size = card_memory_bytes or share_of_host(cards)
    return tuple(
        dataclasses.replace(node, memory_bytes_per_card=size)
        if node.emulated and node.memory_bytes_per_card is None
        else node
        for node in nodes
    )


@contextlib.contextmanager
def in_process_session(
    accelerators: Sequence[Accelerator], card_memory_bytes: int | None = None
) -> Iterator[Session]:
    """One emulated card of each kind, in this process, one job at a time."""
    spec = ",".join(f"1x1:{kind}" for kind in accelerators or (default_accelerator(),))
    nodes = with_memory(parse_emulation(spec, accelerators), card_memory_bytes)

    def executor(
        run: str, log_dir: Path, modules: Sequence[str], label: LabelOf
    ) -> contextlib.closing[InProcessExecutor]:
        # Preloading takes seconds and matters only if memory is limited on purpose.
        preload = (*PRELOAD, *modules) if card_memory_bytes is not None else ()
        return contextlib.closing(InProcessExecutor(nodes, preload=preload))

    yield Session(description="this process, one job at a time", nodes=nodes, executor=executor)


@contextlib.contextmanager
def emulated_session(
    spec: str, accelerators: Sequence[Accelerator], card_memory_bytes: int | None = None
) -> Iterator[Session]:
    """Emulated nodes on this machine; Ray starts with the executor."""
    nodes = with_own_packages(with_memory(parse_emulation(spec, accelerators), card_memory_bytes))
    yield _private_session(f"emulated cards on this machine ({spec})", nodes)


@contextlib.contextmanager
def own_session(accelerators: Sequence[Accelerator]) -> Iterator[Session]:
    """The real cards of this machine, on a private Ray; raises ClusterError if it has none of these
    kinds, or a Ray cluster runs here, which has the cards."""
    nodes = with_own_packages(own_nodes(accelerators))
    if not nodes:
        raise ClusterError(f"no cluster to run on: {no_cards_text(accelerators)}; {WAYS}")
    if there := local_address():
        raise ClusterError(
            f"a Ray cluster runs on this machine, at {there}, and may have its cards: run there "
            f"with --address {there}, or end it with `ray stop`"
        )
    cards = sum(len(node.card_indices) for node in nodes)
    yield _private_session(f"this machine's own {'card' if cards == 1 else 'cards'}", nodes)


def _private_session(description: str, nodes: tuple[Node, ...]) -> Session:
    """Nodes of this machine, on a Ray that lives as long as the executor."""

    @contextlib.contextmanager
    def executor(
        run: str, log_dir: Path, modules: Sequence[str], label: LabelOf
    ) -> Iterator[Executor]:
        preload = (*PRELOAD, *modules)
        threads = threads_of_nodes(nodes)  # None: none of them computes on this host
        with contextlib.ExitStack() as stack:
            spawner = None
            if threads is not None:  # it imports while Ray starts
                try:
                    spawner = OwnSpawner(preload, threads=threads, log=log_dir / log_name())
                except OSError as error:
                    raise ClusterError(f"cannot start workers here: {error}") from error
                stack.callback(spawner.close)
            stack.enter_context(emulate(nodes))
            if spawner is not None:
                stack.callback(spawner.release)  # it ends while Ray does
            opening = RayExecutor(
                run=run,
                log_dir=log_dir,
                preload=preload,
                shared=spawner.shared if spawner is not None else None,
                label=label,
            )
            yield stack.enter_context(contextlib.closing(opening))

    return Session(
        description=description,
        nodes=nodes,
        executor=executor,
        publish=Publisher().publish,
        kept_outcomes=lambda run_id: kept_outcomes((), run_id),
    )


@contextlib.contextmanager
def cluster_session(
    address: str | None, accelerators: Sequence[Accelerator], place: QueueOptions
) -> Iterator[Session]:
    """Join the cluster at ``address``, else the one of this process, for the whole block; its
    executor waits for the run's turn. Raises ClusterError if it cannot be joined."""

    def executor(
        run: str, log_dir: Path, modules: Sequence[str], label: LabelOf
    ) -> contextlib.closing[RayExecutor]:
        owner = Owner.of_this_process()
        queue = RunQueue(
            run=run,
            run_id=owner.run_id if owner is not None else run,
            kinds=tuple(kind.value for kind in accelerators or Accelerator),
            options=place,
        )
        preload = (*PRELOAD, *modules)
        return contextlib.closing(
            RayExecutor(
                run=run, accelerators=accelerators, preload=preload, queue=queue, label=label
            )
        )

    with connect(address) as cluster:
        yield Session(
            description=f"the Ray cluster at {cluster.address}",
            nodes=tuple(cluster.nodes()),
            executor=executor,
            publish=Publisher().publish,
            address=cluster.address,
            look=lambda: tuple(cluster.nodes()),
            described=described,
            kept_outcomes=lambda run_id: kept_outcomes(cluster.nodes(), run_id),
        )
