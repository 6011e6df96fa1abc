"""Memory in use on a card, read every few milliseconds from outside the processes that own it.

NVML lists no processes in some virtual machines, so memory in use has to speak. Where there is no
NVIDIA card the resident memory of worker processes stands for it, to try scripts out.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

MIB = 2**20
WORKER, SERVER = "orchestrator.worker.main", "orchestrator.worker.spawn"


def workers() -> list[psutil.Process]:
    """Processes of workers on this host: by their command, or as forks of the spawner, which is
    itself a child of its reaper."""
    found = {}
    for process in psutil.process_iter(["ppid", "cmdline"]):
        found[process.pid] = process, " ".join(process.info["cmdline"] or ())
    named = [process for process, command in found.values() if WORKER in command]
    servers = {pid for pid, (_, command) in found.items() if SERVER in command}
    beneath = {pid for pid in servers if found[pid][0].info["ppid"] in servers}
    return named or [found[pid][0] for pid in beneath if found[pid][0].info["ppid"] in beneath]


def reader() -> Callable[[], dict[str, Any]]:
    """A function that tells bytes in use, without the driver's own, and the processes listed."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # no package or no driver: the host is the card
        return _host
    return lambda: {
        "used": int(nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used),
        "listed": len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }


def _host() -> dict[str, Any]:
    used = 0
    for process in workers():
        try:
            used += process.memory_info().rss
        except psutil.Error:
            continue
    return {"used": used, "listed": 0}


class CardMemory:
    """A thread that reads until ``close``; ``readings`` are (monotonic time, bytes, listed)."""

    def __init__(self, every_s: float = 0.01) -> None:
        self._read = reader()
        self._every_s = every_s
        self._ended = threading.Event()
        self.readings: list[tuple[float, int, int]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.is_set():
            now = self._read()
            self.readings.append((time.monotonic(), now["used"], now["listed"]))
            self._ended.wait(self._every_s)

    def close(self) -> None:
        """Read no more."""
        self._ended.set()
        self._thread.join()

    @property
    def used(self) -> int:
        """The newest reading."""
        return self.readings[-1][1] if self.readings else 0

    def thinned(self, began: float, smallest_change: int = 64 * MIB) -> list[tuple[float, int]]:
        """Seconds since ``began`` and MiB, at each change that matters and before it."""
        kept: list[tuple[float, int]] = []
        last: tuple[float, int] | None = None
        for at, used, _ in self.readings:
            point = (round(at - began, 3), used // MIB)
            if not kept or abs(point[1] - kept[-1][1]) * MIB >= smallest_change:
                if last is not None and kept and last != kept[-1]:
                    kept.append(last)
                kept.append(point)
            last = point
        return [*kept, last] if last is not None and kept[-1] != last else kept
