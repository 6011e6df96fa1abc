"""Ray's nodes on this host, as the command lines of their own processes (raylets) tell them.

They are there as soon as a command begins, long before it has imported Ray and joined a cluster.
This is no interface of Ray's: who asks must be able to do without an answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.on_ray.control_store import RayNode
from orchestrator.worker.process_table import processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Raylet:
    """A node on this host, in the words of ``ray.nodes()``."""

    node: RayNode
    address: str  # of its cluster
    session: Path  # below which its processes have their logs


def raylets_here(address: str) -> list[Raylet]:
    """This user's nodes on this host that may be of the cluster at an address, ``auto`` or
    ``host:port``; of the newest cluster, where that leaves several. A host has several names, so
    only the port is compared."""
    port = "" if address == "auto" else address.rpartition(":")[2]
    found = []
    for each in sorted(processes().values(), key=lambda process: process.started_ticks):
        with contextlib.suppress(OSError, ValueError):
            if Path(f"/proc/{each.pid}/comm").read_text().strip() == "raylet" and each.is_own():
                words = Path(f"/proc/{each.pid}/cmdline").read_bytes().decode().split("\0")
                found.append(raylet_of(words))
    alike = [each for each in found if not port or each.address.rpartition(":")[2] == port]
    return [each for each in alike if each.address == alike[-1].address]


def raylet_of(command: Sequence[str]) -> Raylet:
    """Read a raylet's command line.

    Raises:
        ValueError: it does not say what is looked for.
    """
    told = dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
    try:
        listed = told["--static_resource_list"].split(",")  # NAME,AMOUNT,NAME,AMOUNT …
        node = {
            "NodeID": told["--node_id"],
            "Alive": True,
            "NodeManagerAddress": told["--node_ip_address"],
            "Resources": {
                name: float(amount) for name, amount in zip(listed[::2], listed[1::2], strict=True)
            },
            "Labels": json.loads(told.get("--labels") or "{}"),
        }
        session = Path(told["--session_dir"])
        return Raylet(node=node, address=told["--gcs-address"], session=session)
    except KeyError as error:
        raise ValueError(f"a raylet's command line has no {error}") from None
