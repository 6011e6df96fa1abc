"""Check a card's speed in a fifth of a second, to compare cards of one kind (sizes too small for
peaks). Each figure is the best of several pieces, since disturbances only slow a piece down."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.devices.base import Device

#: Pieces of each figure, and the least time of one, longer than a scheduling pause. Emulated cards
#: take turns and are slow only at half speed, so shorter pieces do.
PIECES, PIECE_S, EMULATED_PIECE_S = 5, 0.02, 0.005

_HOST_ROWS, _CARD_ROWS = 256, 4096  # of the square matrices
_HOST_BYTES, _CARD_BYTES = 2**23, 2**28  # of the copy
_LINK_NUMBERS = 2**20  # of the all-reduce, in fp32


def check_card(device: Device, *, piece_s: float = PIECE_S) -> dict[str, float]:
    """Measure this process's card: ``matmul_flops`` a second and ``copy_bytes_per_s`` (bytes read
    plus written); a piece takes at least ``piece_s``."""
    # On a CPU, time spent waiting for a core does not count.
    clock = _running_s if device.spec.can("host_cores") else time.perf_counter
    figures = _figures(device, partial(_best_s, device=device, clock=clock, piece_s=piece_s))
    device.release_memory()
    return figures


def _figures(device: Device, best_s: Callable[[Callable[[], None]], float]) -> dict[str, float]:
    import torch

    on_host = device.spec.can("host_cores")
    rows = _HOST_ROWS if on_host else _CARD_ROWS
    kind = torch.float32 if on_host else torch.bfloat16
    left = torch.ones(rows, rows, dtype=kind, device=device.torch_device)
    product = torch.empty_like(left)
    source = torch.zeros(
        _HOST_BYTES if on_host else _CARD_BYTES, dtype=torch.uint8, device=device.torch_device
    )
    target = torch.empty_like(source)

    def multiply() -> None:
        torch.mm(left, left, out=product)

    def copy() -> None:
        target.copy_(source)

    return {
        "matmul_flops": 2.0 * rows**3 / best_s(multiply),
        "copy_bytes_per_s": 2.0 * source.numel() / best_s(copy),
    }


def check_link(size: int, device: Device) -> float:
    """Bytes a second of an all-reduce through each card's link, counting 2 (n - 1) / n of the
    buffer; all ``size`` ranks of a joined gang call it."""
    import torch
    import torch.distributed as distributed

    numbers = torch.zeros(_LINK_NUMBERS, device=device.torch_device)

    def reduce() -> None:
        distributed.all_reduce(numbers)
        device.mark_step()
        device.synchronize()

    reduce()
    times = []
    for _ in range(PIECES):
        began = time.perf_counter()
        reduce()
        times.append(time.perf_counter() - began)
    return 2 * (size - 1) / size * numbers.numel() * numbers.element_size() / min(times)


def _running_s() -> float:
    """Wall time less this thread's wait for a core."""
    now = time.perf_counter()
    try:
        waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return now
    return now - waited_ns / 1e9


def _best_s(
    work: Callable[[], None], device: Device, clock: Callable[[], float], piece_s: float
) -> float:

    def piece(count: int, clock: Callable[[], float] = clock) -> float:
        began = clock()
        for _ in range(count):
            work()
        device.mark_step()
        device.synchronize()
        return clock() - began

    piece(1)  # compiles, and loads the library
    once_s = min(piece(1, time.perf_counter) for _ in range(3))
    count = max(1, round(piece_s / max(once_s, 1e-5)))
    times = [took_s for _ in range(PIECES) if (took_s := piece(count)) > 0]
    return min(times, default=once_s * count) / count
