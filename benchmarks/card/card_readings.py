"""Everything that NVML says of the first card, raw, while it is idle, busy and holds memory.

    python -m benchmarks.card.card_readings OUT.json

Every function of ``nvidia-ml-py`` that takes a handle alone is asked; its answer, or the error,
is kept as it is. Beside it: utilization, clocks, temperature, power, energy and throttle reasons
every 20 ms for three seconds of matrix products, and what each reading costs.
"""

from __future__ import annotations

import inspect
import json
import platform
import subprocess
import sys
import threading
import time
from typing import Any

import pynvml as nvml
import torch

SERIES = {
    "power_mw": lambda h: nvml.nvmlDeviceGetPowerUsage(h),
    "energy_mj": lambda h: nvml.nvmlDeviceGetTotalEnergyConsumption(h),
    "temperature_c": lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
    "memory_temperature": lambda h: (
        nvml.nvmlDeviceGetFieldValues(h, [nvml.NVML_FI_DEV_MEMORY_TEMP])[0].value.uiVal
    ),
    "utilization": lambda h: plain(nvml.nvmlDeviceGetUtilizationRates(h)),
    "sm_mhz": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
    "memory_mhz": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM),
    "max_sm_mhz": lambda h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM),
    "throttle_reasons": lambda h: nvml.nvmlDeviceGetCurrentClocksEventReasons(h),
    "memory": lambda h: plain(nvml.nvmlDeviceGetMemoryInfo(h)),
    "memory_v2": lambda h: plain(nvml.nvmlDeviceGetMemoryInfo(h, nvml.nvmlMemory_v2)),
    "processes": lambda h: [plain(p) for p in nvml.nvmlDeviceGetComputeRunningProcesses(h)],
}
#: Functions that change the card, or wait.
CHANGING = ("Set", "Reset", "Clear", "Register", "Remove", "Create", "Destroy", "Freeze", "Modify")


def plain(value: Any) -> Any:
    """A structure of C as a dictionary."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    names = [field[0] for field in getattr(value, "_fields_", ())]
    return {name: plain(getattr(value, name)) for name in names} or str(value)


def asked(function: Any, *arguments: Any) -> Any:
    """The answer, or the error's name."""
    try:
        return plain(function(*arguments))
    except Exception as error:  # NVMLError of any kind
        return f"{type(error).__name__}: {error}"


def everything(handle: Any) -> dict[str, Any]:
    """All getters that take a handle alone."""
    found = {}
    for name, function in sorted(vars(nvml).items()):
        if not name.startswith("nvmlDeviceGet") or any(word in name for word in CHANGING):
            continue
        needed = [
            p for p in inspect.signature(function).parameters.values() if p.default is p.empty
        ]
        if len(needed) == 1:
            found[name] = asked(function, handle)
    return found


def main() -> int:
    """Read, load the card, read again."""
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    found: dict[str, Any] = {
        "driver": asked(nvml.nvmlSystemGetDriverVersion),
        "nvml": asked(nvml.nvmlSystemGetNVMLVersion),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "idle": everything(handle),
        "idle_series": {name: asked(read, handle) for name, read in SERIES.items()},
        "cost_ms": {},
    }
    for name, read in SERIES.items():
        began = time.perf_counter()
        for _ in range(20):
            asked(read, handle)
        found["cost_ms"][name] = round((time.perf_counter() - began) * 50, 3)
    rows: list[dict[str, Any]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            row = {name: asked(read, handle) for name, read in SERIES.items()}
            rows.append({"at": time.monotonic()} | row)
            ended.wait(0.02)

    thread = threading.Thread(target=watch)
    kept = torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda").fill_(1)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    thread.start()
    began = time.monotonic()
    while time.monotonic() - began < 3:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
    ended.set()
    thread.join()
    found["busy_series"] = rows[::5]
    found["busy"] = everything(handle)
    free, total = torch.cuda.mem_get_info()
    found["torch_memory"] = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "mem_get_info_used": total - free,
        "kept": kept.numel(),
    }
    query = "index,name,driver_version,memory.used,memory.total,memory.reserved,utilization.gpu,"
    query += "clocks.sm,clocks.mem,temperature.gpu,temperature.memory,power.draw,"
    query += "clocks_event_reasons.active"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True
    )
    found["nvidia_smi"] = done.stdout + done.stderr
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(found, out, indent=1, default=str)
    brief = {name: found[name] for name in ("driver", "cost_ms", "torch_memory", "nvidia_smi")}
    print(json.dumps(brief | {"idle_series": found["idle_series"], "last": rows[-1]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
