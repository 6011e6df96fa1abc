"""Ends the actors and placement groups that an earlier driver of the same run holds on a Ray
cluster.

Ray ends the actors and placement groups of a driver that died, once it has noticed. A driver that
was only cut off from the results directory lives on and keeps its cards; so may one that hangs. Its
successor, who holds the run now, finds what is its by name.
"""

from __future__ import annotations

import contextlib
from typing import Any

from orchestrator.errors import ControlStoreLost
from orchestrator.on_ray.control_store import is_absence
from orchestrator.worker.leftovers import Owner


def owned(name: str) -> str:
    """The name of an actor or placement group; it identifies its driver."""
    owner = Owner.of_this_process()
    return f"{name} [{owner}]" if owner else name


def owner_in(name: str) -> Owner | None:
    """The driver that gave this name, if one of ours did."""
    _, bracket, mark = name.rpartition(" [")
    return Owner.of(mark[:-1]) if bracket and mark.endswith("]") else None


def end_predecessors() -> list[str]:
    """Kill the actors and remove the placement groups of earlier drivers of this process's run;
    their names.

    Raises:
        ControlStoreLost: the control store cannot be asked.
    """
    try:
        return _end_predecessors()
    except Exception as error:
        if not is_absence(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ControlStoreLost(f"the cluster's head went while it was joined: {reason}") from error


def _end_predecessors() -> list[str]:
    import ray
    from ray.util import list_named_actors, placement_group_table, remove_placement_group

    owner = Owner.of_this_process()
    if owner is None:
        return []

    def is_earlier(name: str) -> bool:
        theirs = owner_in(name)
        return theirs is not None and theirs.precedes(owner)

    ended: list[str] = []
    for actor in list_named_actors(all_namespaces=True):
        if is_earlier(actor["name"]):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
                ended.append(actor["name"])
    for group_id, group in placement_group_table().items():
        if is_earlier(group["name"]) and group["state"] != "REMOVED":
            remove_placement_group(_placement_group(group_id))
            ended.append(group["name"])
    return ended


def _placement_group(group_id: str) -> Any:
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))
