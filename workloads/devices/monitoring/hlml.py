"""Read Gaudi cards by HLML, the library beneath hl-smi, through Habana's ``pyhlml``.

It tells what hl-smi does not, the energy counter, clocks and why they are lowered, and it never
acquires a card. The package is in Habana's images; the library comes with the driver. Units are
those of pyhlml's docstrings: power in milliwatts, energy in millijoules since the driver was
loaded, memory in bytes, clocks in MHz, utilization over the past second.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
from collections.abc import Callable
from typing import Any

from workloads.devices.monitoring.telemetry import CardTelemetry

#: ``hlmlInit`` and ``hlmlShutdown`` set one variable of the whole process.
_IN_USE = threading.Lock()


def telemetry() -> dict[int, CardTelemetry]:
    """The cards of this host by module id; empty without the package, the library or a driver."""
    try:
        hlml = importlib.import_module("pyhlml")
    except ImportError:
        return {}
    with _IN_USE:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints that it found no library
                hlml.hlmlInit()
        except Exception:
            return {}
        try:
            handles = [hlml.hlmlDeviceGetHandleByIndex(i) for i in range(hlml.hlmlDeviceGetCount())]
            return dict(_card(hlml, handle) for handle in handles)
        except Exception:
            return {}
        finally:
            with contextlib.suppress(Exception):
                hlml.hlmlShutdown()


def _card(hlml: Any, handle: Any) -> tuple[int, CardTelemetry]:
    """Module id and readings of one card; a reading that the driver refuses stays None."""
    module_id = int(hlml.hlmlDeviceGetModuleID(handle))
    memory = _read(hlml.hlmlDeviceGetMemoryInfo, handle)
    power_mw = _read(hlml.hlmlDeviceGetPowerUsage, handle)
    energy_mj = _read(hlml.hlmlDeviceGetTotalEnergyConsumption, handle)
    sensor = hlml.hlml_t.HLML_TEMP_SENS.HLML_TEMPERATURE_ON_AIP
    utilization = _read(hlml.hlmlDeviceGetUtilizationRates, handle)
    clock = _read(hlml.hlmlDeviceGetClockInfo, handle, hlml.hlml_t.HLML_CLOCK_TYPE.HLML_CLOCK_MME)
    reasons = _read(hlml.hlmlDeviceGetCurrentClocksThrottleReasons, handle)
    return module_id, CardTelemetry(
        power_w=None if power_mw is None else power_mw / 1000,
        power_of="" if power_mw is None else "HLML, hlmlDeviceGetPowerUsage",
        energy_j=None if energy_mj is None else energy_mj / 1000,
        temperature_c=_read(hlml.hlmlDeviceGetTemperature, handle, sensor),
        utilization_percent=None if utilization is None else float(utilization.aip),
        sm_clock_mhz=None if clock is None else float(clock),
        throttled=None if reasons is None else _throttled(hlml, int(reasons)),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
    )


def _throttled(hlml: Any, reasons: int) -> frozenset[str]:
    """The reasons for a lowered clock, by name, of the driver's bits."""
    bits = {
        "power cap": hlml.hlml_t.HLML_DEFINE.HLML_CLOCKS_THROTTLE_REASON_POWER,
        "temperature (hardware)": hlml.hlml_t.HLML_DEFINE.HLML_CLOCKS_THROTTLE_REASON_THERMAL,
    }
    return frozenset(name for name, bit in bits.items() if reasons & int(bit))


def _read(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception:  # HLMLError: not supported, no data, the card is lost
        return None
