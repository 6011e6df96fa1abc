"""Ray nodes of this machine without what an emulated cluster has no use for.

Ray starts three Python processes beside each node: a dashboard, even where there is to be none, and
two agents, one for the dashboard and metrics and one that prepares the environments of workers. A
node waits for the imports of all three (over a second of CPU each), and is seen two seconds late.
None of that has a switch. So a node's command is changed on its way to the kernel: idle processes
take the agents' place, and the ports that the node would wait for are written beforehand. Workers
of such a node have the node's own environment, and a label says so (``environment_of``), so that it
can start the interpreter of its agent with itself. Nodes are waited for together once all of them
have been started. A version of Ray that does not have these functions is used as it is.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import ClusterError
from orchestrator.on_ray.control_store import ALIVE

_ASK_EVERY_S = 0.05
_PATIENCE_S = 20.0

#: Variables of workers: Ray runs them at niceness 15, which a benchmark would feel.
NICENESS = "RAY_worker_niceness"
WORKERS = {NICENESS: "0"}
#: Variable of a node: start as many workers with it as its command says.
PRESTART = {"RAY_enable_worker_prestart": "1"}
_PRESTARTED = "--num_prestart_python_workers="
#: Label of a node that prepares no environments.
PLAIN_WORKERS = {"nightgrid.io/plain-workers": "true"}
#: Where nothing listens.
_NO_PORT = 1
_AGENTS = {
    "dashboard_agent_command": (
        "DASHBOARD_AGENT_LISTEN_PORT_NAME",
        "METRICS_AGENT_PORT_NAME",
        "METRICS_EXPORT_PORT_NAME",
    ),
    "runtime_env_agent_command": ("RUNTIME_ENV_AGENT_PORT_NAME",),
}
_IDLE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("idle_agent.py"))]


def environment_of(ray_node: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Options of an actor on a node that is to have these variables; a node whose workers have its
    own environment was given them when it was started."""
    if PLAIN_WORKERS.items() <= ray_node["Labels"].items():
        return {}
    return {"runtime_env": {"env_vars": dict(variables)}}


@contextlib.contextmanager
def bare_nodes(*, metrics: bool = False, workers: int = 0, wait: bool = True) -> Iterator[None]:
    """Nodes that this process starts meanwhile have no dashboard and idle agents, and are seen as
    soon as they are up.

    Args:
        metrics: leave them the agent of the dashboard, which exports metrics.
        workers: interpreters that each starts with itself, where its environment has ``PRESTART``.
        wait: until each is up; else whoever starts them calls ``wait_for_nodes``.
    """
    from ray._private import node, services

    get_node: Any = getattr(services, "get_node", None)
    start_process: Any = getattr(services, "start_ray_process", None)
    agents = dict(_AGENTS)
    if metrics:
        del agents["dashboard_agent_command"]

    def get_node_soon(gcs_address: str, node_id: str) -> Any:
        if not wait:
            return defaultdict(int, labels={})  # of its ports nobody has need
        with contextlib.suppress(TimeoutError):  # then Ray asks itself, and has its own patience
            wait_for_nodes(gcs_address, {node_id: node_id})
        return get_node(gcs_address, node_id)

    def start_bare(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        changed = _with_workers(_with_idle(command, agents), workers)
        return start_process(changed, *args, **kwargs)

    with (
        replaced(node.Node, "start_api_server", lambda *_, **__: None),
        replaced(services, "get_node", get_node_soon),
        replaced(services, "start_ray_process", start_bare),
    ):
        yield


def _with_idle(command: Sequence[str], agents: Mapping[str, Sequence[str]]) -> list[str]:
    """The command of a node with idle processes for these agents; any other command as it is."""
    from ray import _raylet

    given = dict(part[2:].split("=", 1) for part in command if part[:2] == "--" and "=" in part)
    known = vars(_raylet)
    ports = [port for each in agents.values() for port in each]
    if not agents.keys() <= given.keys() or not {"persist_port", *ports} <= known.keys():
        return list(command)
    for port in ports:
        known["persist_port"](given["session_dir"], given["node_id"], known[port], _NO_PORT)
    idle = subprocess.list2cmdline(_IDLE)
    changed = {f"--{name}={given[name]}": f"--{name}={idle}" for name in agents}
    return [changed.get(part, part) for part in command]


def _with_workers(command: Sequence[str], workers: int) -> list[str]:
    """The command of a node that starts so many workers with itself; any other as it is."""
    return [f"{_PRESTARTED}{workers}" if part.startswith(_PRESTARTED) else part for part in command]


def wait_for_nodes(
    gcs_address: str,
    node_ids: Mapping[str, str],
    patience_s: float = _PATIENCE_S,
    has_exited: Callable[[str], bool] = lambda _: False,
) -> None:
    """Wait until the control store knows all nodes to be alive.

    Args:
        node_ids: by the nodes' names.
        has_exited: tells of a node, by its name, that it will never come up.

    Raises:
        TimeoutError: some are not alive in time, or the control store has not answered.
        ClusterError: one has exited.
        Exception: Ray's own, where the control store cannot be asked.
    """
    from ray import NodeID
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
    from ray.exceptions import RpcError

    client = GcsClient(address=gcs_address)
    wanted = {name: NodeID.from_hex(node_id) for name, node_id in node_ids.items()}
    deadline = time.monotonic() + patience_s
    while True:
        try:
            known = client.get_all_node_info(timeout=5)
        except RpcError:  # on a busy machine it may be silent for a while
            known = {}
        alive = {node_id for node_id, info in known.items() if info.state == ALIVE}
        absent = [name for name, node_id in wanted.items() if node_id not in alive]
        if not absent:
            return
        if exited := [name for name in absent if has_exited(name)]:
            raise ClusterError(f"nodes that exited before all were up: {', '.join(exited)}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"nodes not up after {patience_s:g} s: {', '.join(absent)}")
        time.sleep(_ASK_EVERY_S)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have another value for the block; nothing happens where there is none of this name."""
    before = getattr(owner, name, None)
    if before is None:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
