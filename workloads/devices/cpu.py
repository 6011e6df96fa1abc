"""The CPU as a device: host memory, synchronous execution. Emulated cards run here too.

Freed memory stays in glibc's arenas for the next step; ``malloc_trim`` returns it between jobs, so
that each job's peak is its own.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.base import OutOfMemory, supported
from workloads.devices import NF4, CardProcess, DeviceSpec
from workloads.devices.base import Device
from workloads.devices.monitor import host
from workloads.devices.monitor.host import CardTelemetry


def _variables(process: CardProcess) -> dict[str, str]:
    """Hide every accelerator, so that a CPU job cannot find one."""
    hidden = {
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # importing torch would load the Habana bridge
    }
    threads = process.threads
    return hidden if threads is None else hidden | {"MKL_NUM_THREADS": str(threads)}


# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Blocks from this size on are still mapped individually: weights, not activations.
_MAPPED_FROM = 1 << 30


@functools.cache
def _keep_freed_memory() -> None:
    """Make glibc reuse freed memory, once per process.

    By default it returns memory depending on where small blocks lie; faulting pages in again took
    up to a fifth of a training step, differing by process.
    """
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_M_TRIM_THRESHOLD, -1)  # never trim automatically
        glibc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)


def _glibc() -> Any | None:
    import ctypes  # lazy: every plan reads specs

    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:
        return None


def processor() -> str:
    """Return the host's processor model, e.g. ``AMD EPYC 9B14``."""
    pattern = r"^(?:model name|Model|cpu model)\s*:\s*(.+)$"
    match = re.search(pattern, _cpuinfo(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


#: Key in a CPU's versions: its x86 bfloat16 instructions; absent if it has none.
BF16 = "cpu_bf16"

#: Key in a node's facts: cores of its host, of which jobs leave ``spare_cores``.
CORES = "cpu_cores"


def _versions() -> dict[str, str]:
    """The processor's model and, if it has any, its bfloat16 instructions."""
    flags = re.search(r"^flags\s*:(.*)$", _cpuinfo(), re.MULTILINE)
    known = {"amx_bf16", "avx512_bf16"} & set(flags[1].split() if flags else ())
    return {"cpu": processor(), **({BF16: " ".join(sorted(known))} if known else {})}


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


SPEC = DeviceSpec(
    name="cpu",
    accelerator="CPU",
    title="a CPU",
    summary="",
    also_called=("processor", "xeon", "epyc"),
    handle=f"{__name__}:CpuDevice",
    order=30,
    host=True,
    errors={OutOfMemory: ("bfcarena::allocaterawinternal",)},  # ONNX Runtime
    ray_resource="CPU",
    ray_option="num_cpus",
    variables=_variables,
    spare_cores=1,
    versions=_versions,
    precisions={
        "fp32": supported("float32 weights and products"),
        "fp16": supported("float16 weights and products; most CPUs convert, so slower than fp32"),
        "bf16": supported("bfloat16 weights and products"),
        "fp8": supported(
            "torchao float8 (e4m3) weight-only, expanded to bf16 for each product: real fp8 "
            "storage, emulated arithmetic",
            "torchao",
        ),
        "int8": supported(
            "torchao int8 weight-only, one scale per output channel, bf16 products", "torchao"
        ),
        "int4": supported(NF4, "bitsandbytes"),
    },
    capabilities=frozenset(
        {
            *("native_eager", "dynamic_shapes", "fused_optimizer", "optimizers_8bit"),
            *("loss_scaling", "matmul_precision", "onednn"),
            *("contiguous_gradients", "reduce_scatter", "host_cores"),
        }
    ),
)


class CpuDevice(Device):
    """The host's processor. A "card" of a CPU node is a share of its cores."""

    spec = SPEC
    collective_backend = "gloo"

    def __init__(self) -> None:
        _keep_freed_memory()

    @staticmethod
    def telemetry() -> Mapping[int, CardTelemetry]:
        energy_j = host.HOST_ENERGY.read()  # of the whole host: a CPU node is one card
        return {} if energy_j is None else {0: CardTelemetry(energy_j=energy_j)}

    def device_name(self) -> str:
        return processor()

    def driver_version(self) -> str:
        return f"{platform.system()} {platform.release()}"

    def seed_torch(self, seed: int) -> None:
        import torch

        # ``torch.manual_seed`` also queues a seed for cards, with a formatted stack each time.
        torch.default_generator.manual_seed(seed)

    def cannot_compile(self) -> str | None:
        import shutil

        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            return f"kernels for CPUs are C++, and there is no compiler '{compiler}' here"
        return None

    def release_memory(self) -> None:
        gc.collect()
        if (glibc := _glibc()) is not None:
            glibc.malloc_trim(0)
