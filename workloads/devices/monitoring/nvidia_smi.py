"""Read the GPUs of this host by ``nvidia-smi``, which opens no context on one.

Used where NVML's package is missing. It knows no energy counter. Its index counts by bus, as
``CUDA_DEVICE_ORDER=PCI_BUS_ID`` does. Headers keep their units with ``nounits`` too, and a figure
that a GPU does not have is ``[N/A]`` or ``[Not Supported]``.
"""

from __future__ import annotations

import csv

from workloads.devices.base import command_output
from workloads.devices.monitoring.release import CardUse
from workloads.devices.monitoring.telemetry import CardTelemetry, number

QUERY = (
    "index",
    "power.draw",
    "temperature.gpu",
    "utilization.gpu",
    "memory.used",
    "memory.total",
)
COMMAND = ("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,nounits")
_MIB = 2**20


def telemetry() -> dict[int, CardTelemetry]:
    """The GPUs of this host by index; empty where the tool is missing or fails."""
    return parse(command_output(*COMMAND))


def use(index: int) -> CardUse | None:
    """Use of a GPU now, by its memory alone: the tool lists no processes by index. None where
    it is missing or fails. Its figure leaves out the driver's own share, or not: it depends."""
    card = telemetry().get(index)
    return None if card is None else CardUse(used_bytes=card.memory_used_bytes)


def parse(text: str) -> dict[int, CardTelemetry]:
    """The GPUs in the CSV output of a query with ``index``, with or without units in its values.

    Columns are found by their headers; a line that is not one of GPUs is passed over.
    """
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    header = [name.partition("[")[0].strip() for name in next(rows, [])]
    found = {}
    for row in rows:
        values = {name: _figure(value) for name, value in zip(header, row, strict=False)}
        index = values.get("index")
        if index is None:
            continue
        found[int(index)] = CardTelemetry(
            power_w=values.get("power.draw"),
            temperature_c=values.get("temperature.gpu"),
            utilization_percent=values.get("utilization.gpu"),
            memory_used_bytes=_bytes(values.get("memory.used")),
            memory_total_bytes=_bytes(values.get("memory.total")),
        )
    return found


def _figure(text: str) -> float | None:
    """The number before a unit: ``863.87 W`` and ``863.87`` are the same."""
    words = text.split()
    return number(words[0]) if words else None


def _bytes(mebibytes: float | None) -> int | None:
    return None if mebibytes is None else int(mebibytes * _MIB)
