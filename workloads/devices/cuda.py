"""NVIDIA GPUs through torch.cuda. Memory figures are those of torch's caching allocator."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workloads.devices import nvidia_smi, nvml
from workloads.devices.base import (
    HOST_ALLOCATOR_TEXTS,
    Device,
    Texts,
    by_text,
    command_output,
    headline,
)
from workloads.devices.identity import CardIdentity, difference
from workloads.devices.release import CardUse
from workloads.devices.telemetry import CardTelemetry
from workloads.errors import CardNotAcquired, CollectiveFailed, OutOfMemory

_TEXTS: tuple[Texts, ...] = (
    (
        OutOfMemory,
        (
            "cuda out of memory",
            "cuda error: out of memory",
            "cuda_error_out_of_memory",
            "cublas_status_alloc_failed",
            "cudnn_status_alloc_failed",
        ),
    ),
    (
        CardNotAcquired,
        (
            "no cuda-capable device is detected",
            "all cuda-capable devices are busy or unavailable",
            "invalid device ordinal",
            "found no nvidia driver",
            "no cuda gpus are available",
            "torch not compiled with cuda enabled",
        ),
    ),
    (CollectiveFailed, ("nccl error", "ncclsystemerror", "ncclremoteerror", "ncclinternalerror")),
)

#: Compute capability from which a precision has hardware of its own.
_NEEDS_CAPABILITY = {"bf16": (8, 0), "fp8": (8, 9), "int8": (7, 5)}


class CudaDevice(Device):
    """One NVIDIA GPU."""

    name = "cuda"
    collective_backend = "nccl"
    triton = True
    records = True

    @staticmethod
    def environment(
        card_index: int,
        *,
        threads: int | None = None,
        kind: str = "",
        cards: int = 1,
        scratch: str | None = None,
    ) -> dict[str, str]:
        """Show one GPU, counted as nvidia-smi counts (by bus, not by speed)."""
        variables = {
            "CUDA_VISIBLE_DEVICES": str(card_index),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        return variables

    @staticmethod
    def telemetry() -> Mapping[int, CardTelemetry]:
        return nvml.telemetry() or nvidia_smi.telemetry()  # the tool knows no energy

    @staticmethod
    def use(card_index: int) -> CardUse | None:
        return nvml.use(card_index) or nvidia_smi.use(card_index)

    def mismatch(self, card_index: int) -> str | None:
        import torch

        count = torch.cuda.device_count()
        if count != 1:
            return f"it sees {count} GPUs and was given one"
        given = nvml.identity(card_index)
        if given is None:
            return None
        return difference(_identity(torch.cuda.get_device_properties(0)), given)

    @property
    def torch_device(self) -> str:
        return "cuda:0"

    def device_name(self) -> str:
        import torch

        return str(torch.cuda.get_device_name(0))

    def driver_version(self) -> str:
        version = Path("/proc/driver/nvidia/version")
        if version.exists():  # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  …"
            words = version.read_text(encoding="utf-8", errors="replace").split()
            found = [word for word in words if word.replace(".", "").isdigit() and "." in word]
            if found:
                return found[0]
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        return command_output(*query)

    def lacks(self, precision: str) -> str | None:
        needed = _NEEDS_CAPABILITY.get(precision)
        if needed is None:
            return None
        import torch

        has = torch.cuda.get_device_capability(0)
        if has >= needed:
            return None
        return (
            f"{self.device_name()} has compute capability {has[0]}.{has[1]}, "
            f"{precision} needs {needed[0]}.{needed[1]}"
        )

    def cannot_compile(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "kernels for NVIDIA cards need the package 'triton', which is not installed here"
        if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang", "cc"))):
            return "triton needs a C compiler to start its kernels, and there is none here"
        return None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        import torch

        # The first run compiles kernels and makes handles, which no graph may hold.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def launch(kept: Callable[[], None] = work) -> None:  # its tensors are the graph's
            graph.replay()

        return launch

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def stamp(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, earlier: Any, later: Any) -> float | None:
        return float(earlier.elapsed_time(later)) / 1000

    def memory_limit_bytes(self) -> int | None:
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)

    def peak_memory_bytes(self) -> int | None:
        import torch

        return int(torch.cuda.max_memory_allocated())

    def reset_peak_memory(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def release_memory(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def classify(self, error: BaseException) -> BaseException:
        if type(error).__name__ == "OutOfMemoryError":  # torch.OutOfMemoryError, torch.cuda.…
            return OutOfMemory(headline(error))
        if isinstance(error, RuntimeError) and any(
            text in str(error).lower() for text in HOST_ALLOCATOR_TEXTS
        ):
            return MemoryError(headline(error))  # the host's memory, not the card's
        return by_text(error, _TEXTS) or super().classify(error)


def _identity(properties: Any) -> CardIdentity:
    """What torch knows of a GPU; older versions know less."""
    bus_id = ""
    bus, device = (getattr(properties, name, None) for name in ("pci_bus_id", "pci_device_id"))
    if bus is not None and device is not None:
        domain = getattr(properties, "pci_domain_id", 0)
        bus_id = f"{domain:08x}:{bus:02x}:{device:02x}.0"
    return CardIdentity(uuid=str(getattr(properties, "uuid", "") or ""), bus_id=bus_id)
