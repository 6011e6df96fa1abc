"""NVML's functions by the names and units of ``nvidia-ml-py``, over two GPUs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from workloads.devices.monitor import nvidia

MIB = 2**20
GIB = 2**30


class Nvml:
    """GPU 1 has no energy counter, and lists no processes; GPU 0 lists ``processes``, none in some
    virtual machines."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 33554472

    def __init__(self) -> None:
        self.opened = 0
        self.taken, self.reserved = 5 * MIB, 520 * MIB
        self.second_version = True
        self.processes: dict[int, str] = {}
        self.lost: int | None = None

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == self.lost:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 1:
            raise RuntimeError("Not Supported")
        return 123_456_789

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {1: 1440}[kind]

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        if version is None:
            return SimpleNamespace(used=self.taken + self.reserved, total=80 * GIB)
        if not self.second_version:
            raise RuntimeError("Function Not Found")
        return SimpleNamespace(used=self.taken, reserved=self.reserved, total=80 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        if handle == 1:
            raise RuntimeError("Insufficient Permissions")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.processes]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return self.processes[pid]


#: Functions with one answer for both GPUs.
ANSWERS: dict[str, Any] = {
    "PowerUsage": 412_500,
    "Temperature": 61,
    "UtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "CurrentClocksEventReasons": 0x1 | 0x4 | 0x40,
    "GraphicsRunningProcesses": [],
    "DisplayActive": 0,
    "UUID": "GPU-8DCB4B4C-0000-1111-2222-333344445555",
}
for _name, _answer in ANSWERS.items():
    setattr(Nvml, f"nvmlDeviceGet{_name}", lambda *_, answer=_answer: answer)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    nvidia.close_nvml()
    return fake
