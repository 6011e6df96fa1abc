"""Ray nodes of this machine without what an emulated cluster has no use for.

Ray starts a dashboard's process also where there is to be none, and waits for its imports (two
seconds of CPU); and it asks every two seconds whether a node has come up. Both are in functions of
its own that have no switch. A version of Ray that does not have them is used as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

_ASK_EVERY_S = 0.1
_PATIENCE_S = 20.0  # then Ray asks itself, and has its own patience


@contextlib.contextmanager
def bare_nodes() -> Iterator[None]:
    """Nodes that this process starts meanwhile have no dashboard, and are seen as soon as they are
    up."""
    from ray._private import node, services

    get_node: Any = getattr(services, "get_node", None)

    def get_node_soon(gcs_address: str, node_id: str) -> Any:
        _wait_for(gcs_address, node_id)
        return get_node(gcs_address, node_id)

    with (
        replaced(node.Node, "start_api_server", lambda *_, **__: None),
        replaced(services, "get_node", get_node_soon),
    ):
        yield


def _wait_for(gcs_address: str, node_id: str) -> None:
    """Wait until the control store knows the node, not for ever."""
    from ray import NodeID
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

    client, wanted = GcsClient(address=gcs_address), NodeID.from_hex(node_id)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if wanted in client.get_all_node_info(timeout=5):
            return
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
