"""The nodes of a cluster, asked on a machine of it or, over the job interface, from elsewhere.

``python -m orchestrator.on_ray.cluster_nodes`` prints them as JSON: a helper job on the head does
that for a workstation, which cannot join.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.domain.job import Accelerator
from orchestrator.domain.topology import Node
from orchestrator.errors import SubmitError
from orchestrator.host import output
from orchestrator.on_ray.cluster import connect
from orchestrator.on_ray.job_address import is_job_address
from orchestrator.on_ray.submission import JobServer

_ANSWER_S = 120.0


def nodes_at(address: str) -> list[Node]:
    """The nodes with cards of the cluster at an address of either kind.

    Raises:
        ClusterError: it cannot be joined.
        SubmitError: the dashboard does not answer, or not with nodes.
    """
    if not is_job_address(address):
        with connect(address) as cluster:
            return cluster.nodes()
    server = JobServer(address)
    printed = server.ask((), module=__name__, timeout_s=_ANSWER_S)
    for line in printed.splitlines():
        if line.startswith("["):
            return [node_of_json(each) for each in json.loads(line)]
    raise SubmitError(f"{server.address} does not say what nodes it has: {printed.strip()[-500:]}")


def node_of_json(values: Mapping[str, Any]) -> Node:
    """The node that ``main`` has printed."""
    packages = values["packages"]
    told = {
        "accelerator": Accelerator(values["accelerator"]),
        "card_indices": tuple(values["card_indices"]),
        "packages": packages and tuple((name, version) for name, version in packages),
    }
    return Node(**{**values, **told})


def main(arguments: Sequence[str] = ()) -> int:
    """Print the nodes of the cluster that this process is in."""
    with connect("auto") as cluster:
        nodes = cluster.nodes()
    output.say_json([dataclasses.asdict(node) for node in nodes])
    return 0


if __name__ == "__main__":
    sys.exit(main())
