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
    CardTelemetry,
    CardUse,
    Holder,
    attempt,
    csv_rows,
    library_telemetry,
    number_of,
    telemetry_of,
)

_T = TypeVar("_T")

#: Opened once and kept: on an idle GPU each opening would start and stop the driver.
_OPENED: list[Any] = []
_CALLS = LibraryCalls()

#: Bits of NVML's throttle reasons, without idle and user-set clocks.
THROTTLED = {
    "power cap": 0x04,
    "hardware slowdown": 0x08,
    "sync boost": 0x10,
    "temperature (software)": 0x20,
    "temperature (hardware)": 0x40,
    "power brake": 0x80,
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
        if handle is None:
            return None
        # Version 2 reports the driver's share separately; version 1 includes it.
        memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        reserved = 0 if memory is None else int(memory.reserved)
        if memory is None:
            memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle)
        holders = []
        for process in attempt(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
            pid = int(process.pid)
            name = Path(attempt(nvml.nvmlSystemGetProcessName, pid) or "unknown").name
            if pid != os.getpid() and name != _BROKER:
                holders.append(Holder(pid=pid, name=name))
        drawing = attempt(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle)
        return CardUse(
            holders=tuple(sorted(holders, key=lambda holder: holder.pid)),
            used_bytes=None if memory is None else int(memory.used) + reserved,
            reserved_bytes=reserved,
            display=bool(drawing or attempt(nvml.nvmlDeviceGetDisplayActive, handle)),
        )

    return _ask_nvml(read)


def uuid(index: int) -> str:
    """Return a GPU's UUID; "" if unknown."""

    def read(nvml: Any) -> Any:
        handle = _handle(nvml, index)
        return None if handle is None else attempt(nvml.nvmlDeviceGetUUID, handle)

    return _ask_nvml(read) or ""


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
    """Read one GPU, lost or not; None for what the driver refuses."""

    def ask(name: str, *arguments: Any) -> Any:
        return attempt(getattr(nvml, f"nvmlDeviceGet{name}"), handle, *arguments)

    reasons = "CurrentClocksEventReasons", THROTTLED
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        sensor, clock = nvml.NVML_TEMPERATURE_GPU, nvml.NVML_CLOCK_SM
        card = library_telemetry(ask, sensor, clock, "gpu", reasons)
        if card == CardTelemetry():  # then it may have been lost since
            nvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception as error:
        return CardTelemetry(lost=str(error) or type(error).__name__)
    return card


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
    if known := {index: found for index in range(count) if (found := uuid(index))}:
        return known
    printed = command_output("nvidia-smi", "--query-gpu=index,uuid", "--format=csv")
    rows = csv_rows(printed)
    return {int(row["index"]): row.get("uuid", "") for row in rows if row["index"].isdecimal()}


def parse_nvidia_smi(text: str) -> dict[int, CardTelemetry]:
    """Parse the CSV output of a query with ``index``; other lines are skipped."""
    return {
        int(index): telemetry_of(row, "gpu")
        for row in csv_rows(text)
        if (index := number_of(row.get("index"))) is not None
    }
