"""The CPU as a device: memory is the host's, work is done when the call returns.

Emulated cards run here too. glibc keeps freed memory in its arenas; ``malloc_trim`` gives it back,
so that the next job's peak is its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import shutil
import sys
from collections.abc import Mapping

from workloads.devices import rapl
from workloads.devices.base import HOST_ALLOCATOR_TEXTS, Device, by_text, headline
from workloads.devices.telemetry import CardTelemetry
from workloads.errors import OutOfMemory


class CpuDevice(Device):
    """The host's processor. A "card" of a CPU node is a share of its cores."""

    name = "cpu"
    collective_backend = "gloo"

    @staticmethod
    def environment(
        card_index: int,
        *,
        threads: int | None = None,
        kind: str = "",
        cards: int = 1,
        scratch: str | None = None,
    ) -> dict[str, str]:
        """Hide every accelerator: a job that asks for the CPU must not find another device."""
        variables = {
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # importing torch would load the Habana bridge
            "TOKENIZERS_PARALLELISM": "false",
        }
        if threads is not None:
            variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        return variables

    @staticmethod
    def telemetry() -> Mapping[int, CardTelemetry]:
        return rapl.telemetry()  # of all the host: a CPU node is one card

    def device_name(self) -> str:
        try:
            with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.lower().startswith("model name"):
                        return line.partition(":")[2].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine()

    def driver_version(self) -> str:
        return f"{platform.system()} {platform.release()}"

    def cannot_compile(self) -> str | None:
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            return f"kernels for CPUs are C++, and there is no compiler '{compiler}' here"
        return None

    def release_memory(self) -> None:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def classify(self, error: BaseException) -> BaseException:
        # Host memory is this device's memory, so running out of it is the job's own limit.
        if isinstance(error, MemoryError):
            return OutOfMemory(headline(error))
        return by_text(error, ((OutOfMemory, HOST_ALLOCATOR_TEXTS),)) or super().classify(error)
