"""A cluster that ``ray.init`` starts within a contender."""

from __future__ import annotations

import tempfile
from pathlib import Path

from orchestrator.on_ray.cluster import new_token


def own_cluster_variables(directory: Path) -> dict[str, str]:
    """Variables for a process that has not imported Ray yet and starts a cluster by ``ray.init``:
    it listens on the loopback interface and asks for a token, in a directory of its own in
    ``directory``.

    Raises:
        OSError: it cannot be written.
    """
    own = Path(tempfile.mkdtemp(dir=directory))
    token = {name: value or "" for name, value in new_token(own).items()}
    return token | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's word for one host alone
