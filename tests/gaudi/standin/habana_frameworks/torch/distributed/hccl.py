"""The backend ``hccl``, over gloo, with what is its own: a wait has no time limit and never fails.

A rank that has died, or stands still, is not noticed by the others: they wait for it for ever, as
Habana's library does. And a job of several cards has to show each process all of the job's modules
on its server, as Habana documents it.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_FOR_EVER = timedelta(days=365)


def check_modules(world_size: int) -> None:
    """Refuse a communicator of more ranks than a server's modules are shown to its processes."""
    shown = os.environ.get("HABANA_VISIBLE_MODULES", "0,1,2,3,4,5,6,7").split(",")
    own = os.environ.get("HLS_MODULE_ID", "0")
    if min(world_size, 8) > len(shown) or own not in shown:  # a library makes groups of few, too
        raise RuntimeError(
            f"Comm Init Rank Error: {world_size} ranks, HABANA_VISIBLE_MODULES={','.join(shown)}, "
            f"HLS_MODULE_ID={own}"
        )


class HcclGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A group whose collectives are gloo's, and whose waits never end early."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        check_modules(size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=_FOR_EVER)

    def getBackendName(self) -> str:
        return "hccl"

    def __repr__(self) -> str:
        return "HcclGroup"


def _waits(name: str) -> Callable[..., Any]:
    def collective(self: HcclGroup, *arguments: Any, **named: Any) -> Any:
        try:
            work = getattr(self._gloo, name)(*arguments, **named)
            work.wait()
        except RuntimeError:  # a rank is gone
            while True:
                time.sleep(3600)
        return work

    return collective


for _name in (
    *("allreduce", "allgather", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather"),
    *("recv", "recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base", "scatter"),
    "send",
):
    setattr(HcclGroup, _name, _waits(_name))
for _new, _name in (  # torch 2.13's names
    ("all_gather_single", "_allgather_base"),
    ("all_to_all_single", "alltoall_base"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
):
    setattr(HcclGroup, _new, _waits(_name))


def _create(store, rank, size, timeout):  # type: ignore[no-untyped-def]
    return HcclGroup(store, rank, size)


if "hccl" not in dist.Backend.backend_list:
    dist.Backend.register_backend("hccl", _create, devices=["cpu", "hpu"])
