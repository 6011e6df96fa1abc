"""Read NVIDIA GPUs by NVML, the library beneath nvidia-smi, through NVIDIA's ``pynvml``.

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

from workloads.devices.base import command_output
from workloads.devices.monitor.host import (
    CardIdentity,
    CardTelemetry,
    CardUse,
    Holder,
    attempt,
    bytes_of,
    csv_rows,
    number_of,
)

_T = TypeVar("_T")

#: Opened by the first reading and kept: where no process holds a GPU, opening NVML anew each time
#: would make the driver start and stop it.
_OPENED: list[Any] = []
_IN_USE = threading.Lock()

_SM_CLOCK = 1  # NVML_CLOCK_SM

#: NVML's reasons for a lower clock, by bit, but for an idle card and clocks that somebody set.
_THROTTLED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}

#: NVIDIA's broker between processes that share a GPU stays on it and computes nothing itself.
_BROKER = "nvidia-cuda-mps-server"


def nvml_telemetry() -> dict[int, CardTelemetry]:
    """The GPUs of this host by index; empty without the package, the library or a driver."""

    def read(nvml: Any) -> dict[int, CardTelemetry]:
        count = nvml.nvmlDeviceGetCount()
        return {i: _card(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)}

    return _ask_nvml(read) or {}


def nvml_use(index: int) -> CardUse | None:
    """Processes and memory on a GPU now; None without the package, the library or a driver.

    In a container only the container's own processes are listed, in some virtual machines none.
    """
    return _ask_nvml(
        lambda nvml: _use(nvml, _computing(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
    )


def identity(index: int) -> CardIdentity | None:
    """Marks that tell a GPU from all others; None where nobody knows."""

    def read(nvml: Any) -> CardIdentity:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = attempt(nvml.nvmlDeviceGetPciInfo, handle)
        return CardIdentity(
            uuid=_text(attempt(nvml.nvmlDeviceGetUUID, handle)),
            bus_id=_text(getattr(pci, "busId", None)),
        )

    return _ask_nvml(read)


def _ask_nvml(question: Callable[[Any], _T]) -> _T | None:
    """Ask the opened library; None without the package, the library or a driver."""
    with _IN_USE:
        try:
            if not _OPENED:
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                _OPENED.append(nvml)
            return question(_OPENED[0])
        except Exception:  # ImportError, NVMLError; the driver may be loaded anew meanwhile
            close_nvml()
            return None


def close_nvml() -> None:
    """Close the library, if it is open; the next question opens it anew."""
    while _OPENED:
        with contextlib.suppress(Exception):
            _OPENED.pop().nvmlShutdown()


def _card(nvml: Any, handle: Any) -> CardTelemetry:
    """The readings of one GPU; one that the driver refuses stays None."""
    power_mw = attempt(nvml.nvmlDeviceGetPowerUsage, handle)
    energy_mj = attempt(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    temperature = attempt(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    utilization = attempt(nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle)
    clock = _call(nvml, "nvmlDeviceGetClockInfo", handle, _SM_CLOCK)
    # Packages before 12.535 know it by its older name alone.
    reasons = _call(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:
        reasons = _call(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return CardTelemetry(
        power_w=None if power_mw is None else power_mw / 1000,
        energy_j=None if energy_mj is None else energy_mj / 1000,
        temperature_c=None if temperature is None else float(temperature),
        utilization_percent=None if utilization is None else float(utilization.gpu),
        sm_clock_mhz=None if clock is None else float(clock),
        throttled=None if reasons is None else throttle_names(int(reasons)),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
    )


def throttle_names(reasons: int) -> frozenset[str]:
    """The reasons for a lowered clock, by name, of the driver's bits."""
    return frozenset(name for bit, name in _THROTTLED.items() if reasons & bit)


def _computing(nvml: Any, handle: Any) -> Any:
    """Handle of what a process gets that was given a GPU by its index: the GPU, or where it is cut
    up (MIG) its first instance, with memory and processes of its own."""
    mode = _call(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or not mode[0]:
        return handle
    instance = _call(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, 0)
    return handle if instance is None else instance


def _use(nvml: Any, handle: Any) -> CardUse:
    # The second version tells the driver's own share apart, the first counts it as in use.
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle, version) if version else None
    reserved = 0 if memory is None else int(memory.reserved)
    if memory is None:
        memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle)
    drawing = _call(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle)
    return CardUse(
        holders=tuple(_holders(nvml, handle)),
        used_bytes=None if memory is None else int(memory.used) + reserved,
        reserved_bytes=reserved,
        display=bool(drawing) or bool(_call(nvml, "nvmlDeviceGetDisplayActive", handle)),
    )


def _holders(nvml: Any, handle: Any) -> list[Holder]:
    """The processes, other than this one, that have a context for computing on a GPU."""
    processes = []
    for process in attempt(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        pid = int(process.pid)
        name = Path(_text(attempt(nvml.nvmlSystemGetProcessName, pid)) or "unknown").name
        if pid != os.getpid() and name != _BROKER:
            processes.append(Holder(pid=pid, name=name))
    return sorted(processes, key=lambda holder: holder.pid)


def _call(nvml: Any, name: str, *arguments: Any) -> Any:
    """Call a function that older packages do not have; None then, and if it fails."""
    function = getattr(nvml, name, None)
    return None if function is None else attempt(function, *arguments)


def _text(value: Any) -> str:
    """Text as older versions of the package give it, too."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


# Read the GPUs of this host by ``nvidia-smi``, which opens no context on one.
#
# Used where NVML's package is missing. It knows no energy counter. Its index counts by bus, as
# ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` does. Headers keep their units with ``nounits`` too, and a figure
# that a GPU does not have is ``[N/A]`` or ``[Not Supported]``.

QUERY = "index,power.draw,temperature.gpu,utilization.gpu,memory.used,memory.total"
COMMAND = ("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,nounits")


def nvidia_smi_telemetry() -> dict[int, CardTelemetry]:
    """The GPUs of this host by index; empty where the tool is missing or fails."""
    return parse_nvidia_smi(command_output(*COMMAND))


def nvidia_smi_use(index: int) -> CardUse | None:
    """Use of a GPU now, by its memory alone: the tool lists no processes by index. None where
    it is missing or fails. Its figure leaves out the driver's own share, or not: it depends."""
    card = nvidia_smi_telemetry().get(index)
    return None if card is None else CardUse(used_bytes=card.memory_used_bytes)


def parse_nvidia_smi(text: str) -> dict[int, CardTelemetry]:
    """The GPUs in the CSV output of a query with ``index``; other lines are passed over."""
    return {
        int(index): CardTelemetry(
            power_w=number_of(row.get("power.draw")),
            temperature_c=number_of(row.get("temperature.gpu")),
            utilization_percent=number_of(row.get("utilization.gpu")),
            memory_used_bytes=bytes_of(row.get("memory.used")),
            memory_total_bytes=bytes_of(row.get("memory.total")),
        )
        for row in csv_rows(text)
        if (index := number_of(row.get("index"))) is not None
    }
