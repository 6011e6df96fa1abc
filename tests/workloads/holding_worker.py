"""A real worker that takes much of its card's memory, for ``test_real_card.py``; and the host as a
card, so that the test itself can be tried where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from orchestrator.core.outcome import WorkerInfo
from orchestrator.worker.worker import CardWorker
from workloads.devices import cpu
from workloads.devices.base import Device
from workloads.devices.monitor.host import CardUse

#: Bytes that a worker takes, and a file for what it found on its card just before it took it.
HOLDS, FOUND = "NIGHTGRID_TEST_HOLDS", "NIGHTGRID_TEST_FOUND"
#: Set in all processes whose memory counts as that of the host as a card.
MARK = "NIGHTGRID_TEST_MARK"


class HoldingWorker(CardWorker):
    """Tells what was on the card when it was free, and holds memory from its start on."""

    _kept: Any = None

    def start(self) -> WorkerInfo:
        info = super().start()
        import torch

        assert self.device is not None
        size = int(os.environ[HOLDS])
        self._kept = torch.ones(size, dtype=torch.uint8, device=self.device.torch_device)
        self.device.synchronize()
        return info

    def acquire(self, device: Device) -> str:
        found = device.use(self.config.card.index)
        taken = found.taken_bytes if found is not None else None
        Path(os.environ[FOUND]).write_text(json.dumps({"taken": taken, "pid": os.getpid()}))
        return super().acquire(device)


class TamperingWorker(HoldingWorker):
    """One in which something changes the visible cards once the right ones are in use."""

    def acquire(self, device: Device) -> str:
        name = super().acquire(device)
        for variable in self.config.environment:
            if "VISIBLE" in variable:
                os.environ[variable] = "7"
        return name


def use_of_host(card_index: int) -> CardUse:
    """The memory of all processes that carry the mark, this one left out: a card that gives its
    memory back when they are gone, and lists no process."""
    sign, used = f"{MARK}={os.environ[MARK]}".encode(), 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) == os.getpid() or sign not in (entry / "environ").read_bytes():
                continue
            pages = int((entry / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
        used += pages * os.sysconf("SC_PAGE_SIZE")
    return CardUse(used_bytes=used)


if MARK in os.environ:
    cpu.CpuDevice.use = staticmethod(use_of_host)
