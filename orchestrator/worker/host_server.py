"""The process server of a host: how it is started, and the one that a driver starts for all of its
emulated nodes.

Ray needs seconds before there is an agent, and the imports of the workers need as many. So a driver
whose nodes compute on this machine starts the server first, and its agents use that one. Each holds
it: what an agent has asked for ends with the agent, and an agent whose server is gone reports its
node as lost and, claimed anew, starts one of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.core.errors import ClusterError
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Node
from orchestrator.host import output
from orchestrator.host.processors import threads_of_card, usable_cores
from orchestrator.worker.guard import guarded
from orchestrator.worker.leftovers import VARIABLE
from orchestrator.worker.private_directory import make_private_directory
from orchestrator.worker.process_server import OPTIONAL, installed
from orchestrator.worker.serving import open_log
from workloads.devices import environment_for, host_device

#: Modules that a node which computes on the CPU imports once, for all its workers.
PRELOAD = (
    "torch",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.glm.modeling_glm",
    "transformers.models.llama.modeling_llama",
    "orchestrator.worker.card_worker",
    "workloads.text_generation" + OPTIONAL,
    "workloads.generation.transformers_engine" + OPTIONAL,
)
#: Else the allocator of Arrow, which pandas imports, starts a thread, and NumPy's OpenBLAS one for
#: each further thread of OpenMP, and nothing could be forked. Jobs compute with torch, not with it.
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
#: Threads of each worker of a node, in the environment in which its Ray was started.
THREADS = "NIGHTGRID_THREADS"
_END_S = 10.0


def threads_of_worker(kind: Accelerator, cards_on_host: int) -> int:
    """OpenMP threads of each worker of a node of this host: what the environment asks for, or an
    even share of the cores.

    Raises:
        ClusterError: the environment asks for no possible number.
    """
    return threads_asked() or threads_of_card(
        len(usable_cores()), cards_on_host, kind.spec.spare_cores
    )


def threads_of_nodes(nodes: Sequence[Node]) -> int | None:
    """OpenMP threads of each worker of nodes that share this host; None: none computes on it.

    Raises:
        ClusterError: the environment asks for no possible number.
    """
    here = [node for node in nodes if node.computes_on_host]
    if not here:
        return None
    return threads_of_worker(here[0].accelerator, sum(node.server_cards for node in nodes))


def threads_asked() -> int | None:
    """OpenMP threads of a worker that the environment asks for; None: a share of the cores.

    Raises:
        ClusterError: it is no whole number above 0.
    """
    told = os.environ.get(THREADS, "")
    if not told:
        return None
    if not told.isdecimal() or int(told) < 1:
        raise ClusterError(
            f"{THREADS}={told!r} is not a number of threads; give a whole number from 1 up, or "
            "unset it for an even share of the cores"
        )
    return int(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedServer:
    """A process server of this host that agents may use, if their workers have as many threads."""

    path: str  # its socket
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    """A process server that this process has for its agents."""

    shared: SharedServer
    #: Has it end by itself, once no agent needs it; the block that it was started for waits for it.
    release: Callable[[], None]


def preload_with(packages: Sequence[str]) -> tuple[str, ...]:
    """``PRELOAD`` and packages that only some jobs need: one that is broken fails no others."""
    return (*PRELOAD, *(name + OPTIONAL for name in packages))


def start_server(
    path: str, preload: Sequence[str], *, threads: int, log: Path
) -> subprocess.Popen[bytes]:
    """Start a process server that ends with its standard input. It listens soon, and forks once
    that of ``preload`` is imported which is installed here.

    Args:
        path: its socket, alone in a directory.
        threads: OpenMP reads its variable when torch is imported, which may be in the server.
    """
    command = [sys.executable, "-m", "orchestrator.worker.process_server", path]
    logged = open_log(str(log))
    try:
        return subprocess.Popen(
            [*command, *installed(preload)],
            stdin=subprocess.PIPE,
            stdout=logged,
            stderr=logged,
            env=_environment(threads),
            start_new_session=True,  # Ctrl-C is for the driver, which ends its jobs in order
        )
    finally:
        os.close(logged)


def _environment(threads: int) -> dict[str, str]:
    """Variables of a process that imports for workers of so many threads."""
    shown = environment_for(host_device().name, 0, threads=threads)
    return (
        _NO_THREADS | os.environ | shown | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )


def log_name() -> str:
    """Name of the log of a server that this process starts."""
    return f"process-server-{socket.gethostname()}-{os.getpid()}.log"


@contextlib.contextmanager
def shared_server(
    preload: Sequence[str], *, threads: int, log_dir: Path
) -> Iterator[OwnServer | None]:
    """Have a server for the agents of this host within the block; None where none can be started,
    and the agents start their own."""
    with contextlib.ExitStack() as stack:
        try:
            directory = make_private_directory(os.environ.get(VARIABLE, ""))
            stack.callback(directory.remove)
            stack.enter_context(guarded(directory))
            log_dir.mkdir(parents=True, exist_ok=True)
            path, log = str(directory.path / "s"), log_dir / log_name()
            started = start_server(path, preload, threads=threads, log=log)
            stack.callback(end_server, started)
        except OSError as error:
            output.say_aside(f"no process server for all nodes: {error}")
            yield None
            return
        shared = SharedServer(path=path, threads=threads)
        yield OwnServer(shared=shared, release=partial(release_server, started))


def release_server(server: subprocess.Popen[bytes]) -> None:
    """Have a server of this process end, with every worker of it."""
    if server.stdin is not None:
        server.stdin.close()


def end_server(server: subprocess.Popen[bytes]) -> None:
    """End a server of this process and every worker of it; returns when they are gone."""
    release_server(server)
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()  # the guardian, without which the server ends everything by itself
        server.wait()


def wait_for_server(path: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server listens.

    Raises:
        RuntimeError: it ended instead; the message has the end of its log.
    """
    from orchestrator.worker.card_process import tail_of

    while not os.path.exists(path):
        if server.poll() is not None:
            raise RuntimeError(f"the process server ended at once: {tail_of(str(log), os.environ)}")
        time.sleep(0.02)
