"""What NVML, the library beneath nvidia-smi, says of NVIDIA GPUs, through NVIDIA's ``pynvml``.

It tells what nvidia-smi does not, the energy counter (Volta and newer), and it opens no context on
a GPU. The package is ``nvidia-ml-py``; the library comes with the driver. NVML counts GPUs by bus,
as ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` does; power is in milliwatts, energy in millijoules since the
driver was loaded, memory in bytes, utilization over the past sample period.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from workloads.devices.telemetry import CardTelemetry, Holder

_T = TypeVar("_T")

#: Opened by the first reading and kept: where no process holds a GPU, opening NVML anew each time
#: would make the driver start and stop it.
_OPENED: list[Any] = []
_IN_USE = threading.Lock()

#: NVIDIA's broker between processes that share a GPU stays on it and computes nothing itself.
_BROKER = "nvidia-cuda-mps-server"


def telemetry() -> dict[int, CardTelemetry]:
    """The GPUs of this host by index; empty without the package, the library or a driver."""

    def read(nvml: Any) -> dict[int, CardTelemetry]:
        count = nvml.nvmlDeviceGetCount()
        return {i: _card(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)}

    return _asked(read) or {}


def occupied(index: int) -> str | None:
    """Which other processes compute on a GPU now; None where none does or nobody can tell.

    In a container only the container's own processes are listed. Memory says nothing more here: a
    display takes some of it, and so does the driver.
    """
    holders = _asked(lambda nvml: _holders(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
    return f"card {index} is held by {', '.join(map(str, holders))}" if holders else None


def _asked(question: Callable[[Any], _T]) -> _T | None:
    """What the opened library answers; None without the package, the library or a driver."""
    with _IN_USE:
        try:
            if not _OPENED:
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                _OPENED.append(nvml)
            return question(_OPENED[0])
        except Exception:  # ImportError, NVMLError; the driver may be loaded anew meanwhile
            _close()
            return None


def _close() -> None:
    while _OPENED:
        with contextlib.suppress(Exception):
            _OPENED.pop().nvmlShutdown()


def _card(nvml: Any, handle: Any) -> CardTelemetry:
    """The readings of one GPU; one that the driver refuses stays None."""
    power_mw = _read(nvml.nvmlDeviceGetPowerUsage, handle)
    energy_mj = _read(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    temperature = _read(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    utilization = _read(nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _read(nvml.nvmlDeviceGetMemoryInfo, handle)
    return CardTelemetry(
        power_w=None if power_mw is None else power_mw / 1000,
        energy_j=None if energy_mj is None else energy_mj / 1000,
        temperature_c=None if temperature is None else float(temperature),
        utilization_percent=None if utilization is None else float(utilization.gpu),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
    )


def _holders(nvml: Any, handle: Any) -> list[Holder]:
    """The processes, other than this one, that have a context for computing on a GPU."""
    found = []
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        pid = int(process.pid)
        name = Path(_read(nvml.nvmlSystemGetProcessName, pid) or "unknown").name
        if pid != os.getpid() and name != _BROKER:
            found.append(Holder(pid=pid, name=name))
    return sorted(found, key=lambda holder: holder.pid)


def _read(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception:  # NVMLError: not supported here, no permission, the GPU is lost
        return None
