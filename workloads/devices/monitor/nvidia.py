"""Read NVIDIA GPUs by NVML, the library beneath nvidia-smi, through NVIDIA's ``nvidia-ml-py``.

Unlike nvidia-smi it has the energy counter (Volta and newer); it opens no context. Indices are by
bus, as with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; power in mW, energy in mJ since the driver was
loaded, memory in bytes, utilization over the past sample period.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from workloads.devices.base import LibraryCalls, command_output
from workloads.devices.monitor.host import (
    CardIdentity,
    CardTelemetry,
    CardUse,
    Holder,
    attempt,
    csv_rows,
    number_of,
    telemetry_of,
)

_T = TypeVar("_T")

#: Opened once and kept: on an idle GPU each opening would start and stop the driver.
_OPENED: list[Any] = []
_CALLS = LibraryCalls()

#: NVML's throttle reasons by bit, without idle and user-set clocks.
_THROTTLED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}

#: NVIDIA's MPS server stays on a shared GPU but computes nothing itself.
_BROKER = "nvidia-cuda-mps-server"


def nvml_telemetry() -> dict[int, CardTelemetry]:
    """Read this host's GPUs by index; empty without the package, library or driver."""

    def read(nvml: Any) -> dict[int, CardTelemetry]:
        cards = {index: _card_at(nvml, index) for index in range(nvml.nvmlDeviceGetCount())}
        if cards and all(card.lost for card in cards.values()):
            raise LookupError("the library itself may be lost")
        return cards

    return _ask_nvml(read) or {}


def nvml_use(index: int) -> CardUse | None:
    """Return a GPU's processes (of its container) and memory; None without package or driver."""

    def read(nvml: Any) -> CardUse | None:
        handle = _handle(nvml, index)
        return None if handle is None else _use(nvml, _computing(nvml, handle))

    return _ask_nvml(read)


def identity(index: int) -> CardIdentity | None:
    """Return a GPU's identity; None if unknown."""

    def read(nvml: Any) -> CardIdentity | None:
        handle = _handle(nvml, index)
        if handle is None:
            return None
        pci = attempt(nvml.nvmlDeviceGetPciInfo, handle)
        return CardIdentity(
            uuid=attempt(nvml.nvmlDeviceGetUUID, handle) or "",
            bus_id="" if pci is None else pci.busId,
        )

    return _ask_nvml(read)


def _handle(nvml: Any, index: int) -> Any:
    """Return a GPU's handle, None for a lost one; raises if the library is lost."""
    handle = attempt(nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        nvml.nvmlDeviceGetCount()
    return handle


def _ask_nvml(question: Callable[[Any], _T]) -> _T | None:
    """Query the opened library; None without the package, library or driver, or if it hangs."""

    def ask() -> _T | None:
        try:
            if not _OPENED:
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                _OPENED.append(nvml)
            return question(_OPENED[0])
        except Exception:  # ImportError, NVMLError; the driver may be reloaded
            close_nvml()
            return None

    return _CALLS.call(ask)


def close_nvml() -> None:
    """Close the library; the next query reopens it."""
    while _OPENED:
        with contextlib.suppress(Exception):
            _OPENED.pop().nvmlShutdown()


def _card_at(nvml: Any, index: int) -> CardTelemetry:
    """Read one GPU, lost or not."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        card = _card(nvml, handle)
        if card == CardTelemetry():  # then it may have been lost since
            nvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception as error:
        return CardTelemetry(lost=str(error) or type(error).__name__)
    return card


def _card(nvml: Any, handle: Any) -> CardTelemetry:
    """Read one GPU; None for what the driver refuses."""
    power_mw = attempt(nvml.nvmlDeviceGetPowerUsage, handle)
    energy_mj = attempt(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    temperature = attempt(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    utilization = attempt(nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle)
    clock = attempt(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
    reasons = attempt(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
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
    """Decode the driver's bits into names of throttle reasons."""
    return frozenset(name for bit, name in _THROTTLED.items() if reasons & bit)


def _computing(nvml: Any, handle: Any) -> Any:
    """Return the handle of the GPU, or of its first MIG instance, which a process gets."""
    mode = attempt(nvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return handle
    instance = attempt(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, 0)
    return handle if instance is None else instance


def _use(nvml: Any, handle: Any) -> CardUse:
    # Version 2 reports the driver's share separately; version 1 includes it.
    memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    reserved = 0 if memory is None else int(memory.reserved)
    if memory is None:
        memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle)
    drawing = attempt(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle)
    return CardUse(
        holders=tuple(_holders(nvml, handle)),
        used_bytes=None if memory is None else int(memory.used) + reserved,
        reserved_bytes=reserved,
        display=bool(drawing) or bool(attempt(nvml.nvmlDeviceGetDisplayActive, handle)),
    )


def _holders(nvml: Any, handle: Any) -> list[Holder]:
    processes = []
    for process in attempt(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        pid = int(process.pid)
        name = Path(attempt(nvml.nvmlSystemGetProcessName, pid) or "unknown").name
        if pid != os.getpid() and name != _BROKER:
            processes.append(Holder(pid=pid, name=name))
    return sorted(processes, key=lambda holder: holder.pid)


# Read GPUs by ``nvidia-smi``, which opens no context, where NVML's package is missing.
#
# No energy counter. Indices are by bus. Headers keep units despite ``nounits``; missing figures are
# ``[N/A]`` or ``[Not Supported]``.

QUERY = "index,power.draw,temperature.gpu,utilization.gpu,memory.used,memory.total"
COMMAND = ("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,nounits")


#: Printed for a lost GPU, and mostly instead of all others.
_LOST = re.compile(r"device handle for GPU\s*\S+: +(.+)")
#: The driver's directory for each GPU, by bus id.
GPUS = Path("/proc/driver/nvidia/gpus")


def nvidia_smi_telemetry() -> dict[int, CardTelemetry]:
    """Read this host's GPUs by index, one by one if one is lost; empty without the tool."""
    printed = command_output(*COMMAND)
    cards = parse_nvidia_smi(printed)
    if _LOST.search(printed) is None:
        return cards
    buses = sorted(directory.name for directory in GPUS.glob("*"))
    for index, bus in enumerate(buses):
        if index not in cards:
            printed = command_output(*COMMAND, f"--id={bus}")
            lost = _LOST.search(printed)
            unread = CardTelemetry(lost=lost[1] if lost else "nvidia-smi says nothing of it")
            cards[index] = parse_nvidia_smi(printed).get(index, unread)
    if not buses:
        lost = _LOST.search(printed)
        missing = next(index for index in range(len(cards) + 1) if index not in cards)
        cards[missing] = CardTelemetry(lost=lost[1] if lost else "")
    return cards


def uuids() -> dict[int, str]:
    """Return the UUIDs of this host's GPUs by index."""
    count = _ask_nvml(lambda nvml: int(nvml.nvmlDeviceGetCount())) or 0
    known = {index: card.uuid for index in range(count) if (card := identity(index))}
    if known:
        return known
    printed = command_output("nvidia-smi", "--query-gpu=index,uuid", "--format=csv")
    rows = csv_rows(printed)
    return {int(row["index"]): row.get("uuid", "") for row in rows if row["index"].isdecimal()}


def nvidia_smi_use(index: int) -> CardUse | None:
    """Return a GPU's memory in use, with or without the driver's share; None if unavailable."""
    card = nvidia_smi_telemetry().get(index)
    return None if card is None else CardUse(used_bytes=card.memory_used_bytes)


def parse_nvidia_smi(text: str) -> dict[int, CardTelemetry]:
    """Parse the CSV output of a query with ``index``; other lines are skipped."""
    return {
        int(index): telemetry_of(row, "gpu")
        for row in csv_rows(text)
        if (index := number_of(row.get("index"))) is not None
    }
