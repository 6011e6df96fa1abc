"""The backend ``hccl``, over gloo."""

import os

import torch.distributed as dist


def initialize_distributed_hpu() -> tuple[int, int, int]:
    """World size, rank and local rank, as a launcher has set them."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    return world_size, int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))


def _create(store, rank, size, timeout):  # type: ignore[no-untyped-def]
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


if "hccl" not in dist.Backend.backend_list:
    dist.Backend.register_backend("hccl", _create, devices=["cpu", "hpu"])
