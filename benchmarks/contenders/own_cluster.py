"""A cluster that ``ray.init`` starts within a contender."""

from __future__ import annotations

from pathlib import Path

from orchestrator.on_ray.token import new_token


def own_cluster_variables(directory: Path) -> dict[str, str]:
    """Variables for a process that has not imported Ray yet and starts a cluster by ``ray.init``:
    it listens on the loopback interface and asks for a token, written into ``directory``.

    Raises:
        OSError: it cannot be written.
    """
    token = {name: value or "" for name, value in new_token(directory).items()}
    return token | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's word for one host alone
