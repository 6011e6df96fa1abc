"""A short passport of a card: how fast it multiplies, copies and exchanges, in a fifth of a second.

Cards of one kind are not equally fast: one runs hot, one was put into a slower slot, one has a link
that retrains. Each figure is the best of several short pieces, since whatever disturbs a piece
makes it slower and nothing makes it faster; a card that is slow is slow in every piece. The sizes
are small, so these are figures to hold cards against each other with, and no peaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.devices.base import Device

#: Pieces of each figure, and the least time of one: longer than what may stop a process for a
#: moment.
PIECES, PIECE_S = 3, 0.02

_HOST_ROWS, _CARD_ROWS = 256, 4096  # of the square matrices
_HOST_BYTES, _CARD_BYTES = 2**23, 2**28  # of the copy
_LINK_NUMBERS = 2**20  # of the all-reduce, in fp32


def measure_passport(
    device: Device, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Figures of the card that this process has: ``matmul_flops`` a second and
    ``copy_bytes_per_s``, read and written bytes together."""
    found = _figures(device, clock)
    device.release_memory()
    return found


def _figures(device: Device, clock: Callable[[], float]) -> dict[str, float]:
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
        "matmul_flops": 2.0 * rows**3 / _best_s(multiply, device, clock),
        "copy_bytes_per_s": 2.0 * source.numel() / _best_s(copy, device, clock),
    }


def measure_link(
    size: int, device: Device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes a second that an all-reduce moves through each card's link, by the usual count of
    2 (n - 1) / n of the buffer; all ``size`` ranks of the gang, which have met, call it."""
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
        began = clock()
        reduce()
        times.append(clock() - began)
    return 2 * (size - 1) / size * numbers.numel() * numbers.element_size() / min(times)


def _best_s(work: Callable[[], None], device: Device, clock: Callable[[], float]) -> float:
    """The shortest time of one call, over pieces of as many calls as take ``PIECE_S``."""

    def piece(count: int) -> float:
        began = clock()
        for _ in range(count):
            work()
        device.mark_step()
        device.synchronize()
        return clock() - began

    piece(1)  # compiles, and loads the library
    count = max(1, round(PIECE_S / max(piece(1), 1e-7)))
    return min(piece(count) for _ in range(PIECES)) / count
