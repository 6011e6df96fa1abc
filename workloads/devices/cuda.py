"""NVIDIA GPUs through torch.cuda. Memory peaks are those of torch's caching allocator.

Two settings affect speed and memory but not results. Both are off, can be enabled in the
environment of a node's Ray, and are recorded in the row's ``details``:

- ``cudnn_attention``: torch prefers cuDNN on Hopper, which builds a plan per shape and process.
  Decoding has a new shape at every step: a first pass took 11.6 s, the second 3.9. Once built, it
  is as fast as the kernels that replace it.
- ``expandable_segments`` of torch's allocator: less fragmentation.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from workloads.base import CardFaulty, CardNotAcquired, CollectiveFailed, OutOfMemory, supported
from workloads.devices import NF4, DeviceSpec, Finding, Level, ServerFacts, Texts, release_of
from workloads.devices.base import Device, command_output, version_in
from workloads.devices.monitor import nvidia
from workloads.devices.monitor.host import CardTelemetry, CardUse

#: By CUDA's runtime and driver, its libraries, NCCL, Triton, ONNX Runtime and NVML. Faults of the
#: card that a job's own kernel may cause, too, are the card's until the job fails on another.
_ERRORS: Texts = {
    CardFaulty: (
        "uncorrectable ecc error",
        "cuda_error_ecc_uncorrectable",
        "uncorrectable nvlink error",
        "hardware stack error",
        "invalid access of peer gpu memory over nvlink or a hardware error",
        "gpu is lost",
        "fallen off the bus",
        "gpu requires reset",  # nvidia-smi
        "gpu requires restart",  # pynvml
        "unable to determine the device handle",
        "unspecified launch failure",
        "cuda_error_launch_failed",
        "illegal memory access was encountered",
        "cuda_error_illegal_address",
    ),
    OutOfMemory: (
        "cuda out of memory",
        "cuda error: out of memory",
        "cuda driver error: out of memory",
        "cuda error out of memory",
        "cuda runtime error (2)",
        "cuda failure 2: out of memory",
        "triton error [cuda]: out of memory",
        "cuda failure 'out of memory'",
        "cuda failure 2 'out of memory'",
        "failed to cuda calloc",
        "cuda_error_out_of_memory",
        "cudaerrormemoryallocation",
        "_status_alloc_failed",  # of cuBLAS, cuDNN and cuSOLVER
        "cudnn_status_internal_error_device_allocation_failed",
        "cusparse_status_insufficient_resources",
        "cuda error: insufficient resources when calling",
        "cufft_alloc_failed",
        "bfcarena::allocaterawinternal",
    ),
    CardNotAcquired: (
        "no cuda-capable device is detected",
        "all cuda-capable devices are busy or unavailable",
        "invalid device ordinal",
        "found no nvidia driver",
        "no cuda gpus are available",
        "torch not compiled with cuda enabled",
        "cuda error: initialization error",
        "cuda runtime error (3)",
        "cuda error: unknown error",
        "cuda unknown error",
        "system not yet initialized",  # NVSwitch without its fabric manager
        "unsupported display driver / cuda driver combination",
        "driver/library version mismatch",
        "nvml/rm version mismatch",
        "cuda driver version is insufficient",
        "cuda_error_not_initialized",
        "_status_not_initialized",  # of cuBLAS, cuDNN and cuSOLVER
    ),
    CollectiveFailed: ("nccl error", "ncclsystemerror", "ncclremoteerror", "ncclinternalerror"),
}

#: Set to "1" to enable cuDNN's attention; torch has no variable for it.
CUDNN_ATTENTION = "NIGHTGRID_CUDNN_ATTENTION"
#: torch's allocator variables; the first one set counts.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

#: Minimum compute capability with hardware for a precision.
_NEEDS_CAPABILITY = {"bf16": (8, 0), "fp8": (8, 9), "int8": (7, 5)}


def _toolkit_version() -> dict[str, str]:
    """Return the CUDA version that torch was built for, from its files; empty for other builds."""
    from importlib import metadata

    try:
        files = metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(files)).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return {"cuda": match[1]} if match else {}


#: CUDA release of torch -> oldest driver that runs it (NVIDIA, "CUDA Compatibility", table 1 of
#: "Minor Version Compatibility").
_OLDEST_DRIVERS: Mapping[tuple[int, ...], int] = {(11,): 450, (12,): 525, (13,): 580}


def examine_server(_cards: int, facts: ServerFacts) -> Iterator[Finding]:
    """Check that the driver is new enough for the CUDA release of the node's torch. Pure."""
    toolkit, driver = facts.versions.get("cuda", ""), facts.driver_version or ""
    oldest = _OLDEST_DRIVERS.get(release_of(toolkit)[:1], 0)
    if driver and release_of(driver) < (oldest,):
        yield Finding(
            "driver",
            f"the driver is {driver}, and torch {facts.versions.get('torch', '')} is built for "
            f"CUDA {toolkit}, which needs {oldest} or newer: no job can use a card",
            f"install NVIDIA's driver {oldest} or newer on the server, or torch for the driver's "
            "CUDA (https://pytorch.org/get-started/previous-versions)",
            Level.ERROR,
        )


SPEC = DeviceSpec(
    name="cuda",
    accelerator="GPU",
    title="NVIDIA",
    summary="NVIDIA",
    also_called=("geforce", "tesla", "rtx"),
    handle=f"{__name__}:CudaDevice",
    order=20,
    ray_resource="GPU",
    ray_option="num_gpus",
    ray_indices=True,
    registration="NVIDIA cards are found by Ray where the driver works (`nvidia-smi`)",
    visible_variable="CUDA_VISIBLE_DEVICES",
    container_variable="NVIDIA_VISIBLE_DEVICES",
    # nvidia-smi's order: by bus, not by speed.
    variables=lambda process: {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    precisions={
        "fp32": supported("float32 weights and products (TF32 off)"),
        "fp16": supported("float16 weights and products"),
        "bf16": supported("bfloat16 weights and products; compute capability 8.0 or newer"),
        "fp8": supported(
            "torchao float8 (e4m3) weights and activations, scaled as they come; fp8 products; "
            "compute capability 8.9 or newer",
            "torchao",
        ),
        "int8": supported(
            "bitsandbytes LLM.int8(): int8 weights and activations, outliers in 16 bits",
            "bitsandbytes",
        ),
        "int4": supported(NF4, "bitsandbytes"),
    },
    capabilities=frozenset(
        {
            *("own_memory", "native_eager", "dynamic_shapes", "graphs"),
            *("pinned_memory", "pinned_offload", "paged_memory"),
            *("fused_optimizer", "optimizers_8bit", "loss_scaling", "matmul_precision"),
            *("flash_attention_2", "xformers", "liger_kernels", "fp8_products", "nf4_any_width"),
            "sparse_2_4",
            *("overlapped_exchange", "contiguous_gradients", "reduce_scatter"),
        }
    ),
    errors=_ERRORS,
    packages=("triton",),
    tool="nvidia-smi",
    driver_command=("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    versions=_toolkit_version,
    examine=examine_server,
    no_cards_remedy="does `nvidia-smi` work on the server, and was the container started with "
    "--gpus=all?",
    data_sheets=(
        (r"(NVIDIA )?A100-SXM4?-80GB", "A100-SXM-80GB"),
        (r"(NVIDIA )?A800-SXM4?-80GB", "A800-SXM-80GB"),
        (r"(NVIDIA )?H100(-SXM5?)?( 80GB HBM3|-80GB-HBM3)", "H100-SXM"),
        (r"(NVIDIA )?H800(-SXM5?)?( 80GB HBM3|-80GB-HBM3)?", "H800-SXM"),
        (r"(NVIDIA )?H200(-SXM)?( 141GB HBM3e)?", "H200-SXM"),
        (r"(NVIDIA )?L40S", "L40S"),
    ),
)


class CudaDevice(Device):
    """One NVIDIA GPU."""

    spec = SPEC
    collective_backend = "nccl"
    triton = True
    records = True

    @staticmethod
    def telemetry() -> Mapping[int, CardTelemetry]:
        return nvidia.nvml_telemetry() or nvidia.nvidia_smi_telemetry()  # the tool has no energy

    @staticmethod
    def uuids() -> Mapping[int, str]:
        return nvidia.uuids()

    @staticmethod
    def use(card_index: int) -> CardUse | None:
        if (use := nvidia.nvml_use(card_index)) is not None:
            return use
        # The tool has memory alone, with or without the driver's share.
        card = nvidia.nvidia_smi_telemetry().get(card_index)
        return None if card is None else CardUse(used_bytes=card.memory_used_bytes)

    @property
    def _cuda(self) -> Any:
        import torch

        return torch.cuda

    def mismatch(self, card_index: int) -> str | None:
        count = self._cuda.device_count()
        if count != 1:
            return f"it sees {count} GPUs and was given one"
        uuids = getattr(self._cuda.get_device_properties(0), "uuid", ""), nvidia.uuid(card_index)
        has, given = (str(uuid or "").lower().removeprefix("gpu-") for uuid in uuids)
        # A MIG instance has a UUID of its own.
        if has == given or not (has and given) or has.startswith("mig-"):
            return None
        return f"it has the card with the UUID {has} and was given {given}"

    @property
    def torch_device(self) -> str:
        return "cuda:0"

    def device_name(self) -> str:
        return str(self._cuda.get_device_name(0))

    def driver_version(self) -> str:
        version = Path("/proc/driver/nvidia/version")
        if version.exists():  # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  …"
            text = version.read_text(encoding="utf-8", errors="replace")
            if number := re.search(r"(?<!\S)\d+(\.\d+)+(?!\S)", text):
                return number[0]
        return version_in(command_output(*SPEC.driver_command))

    def lacks(self, precision: str) -> str | None:
        needed = _NEEDS_CAPABILITY.get(precision)
        if needed is None:
            return None
        has = self._cuda.get_device_capability(0)
        if has >= needed:
            return None
        return (
            f"{self.device_name()} has compute capability {has[0]}.{has[1]}, "
            f"{precision} needs {needed[0]}.{needed[1]}"
        )

    def cannot_compile(self) -> str | None:
        import shutil

        if importlib.util.find_spec("triton") is None:
            return "kernels for NVIDIA cards need the package 'triton', which is not installed here"
        if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang", "cc"))):
            return "triton needs a C compiler to start its kernels, and there is none here"
        return None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        import torch

        # The first run compiles kernels and creates handles, which a graph must not capture.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def launch(work_of_graph: Callable[[], None] = work) -> None:  # keeps its tensors alive
            graph.replay()

        return launch

    def configure(self) -> Mapping[str, str]:
        import torch

        torch.backends.cuda.enable_cudnn_sdp(os.environ.get(CUDNN_ATTENTION) == "1")
        return {
            "cudnn_attention": "on" if torch.backends.cuda.cudnn_sdp_enabled() else "off",
            "expandable_segments": "on" if expandable_segments(os.environ) else "off",
        }

    def memory_details(self) -> Mapping[str, str]:
        free, total = self._cuda.mem_get_info()
        return {
            "peak_reserved_memory_bytes": str(self._cuda.max_memory_reserved()),
            "card_memory_in_use_bytes": str(total - free),  # of all processes and the driver
        }

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def card_random(self) -> Any:
        return self._cuda

    def stamp(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, earlier: Any, later: Any) -> float | None:
        return float(earlier.elapsed_time(later)) / 1000

    def memory_limit_bytes(self) -> int | None:
        return int(self._cuda.get_device_properties(0).total_memory)

    def peak_memory_bytes(self) -> int | None:
        return int(self._cuda.max_memory_allocated())

    def reset_peak_memory(self) -> None:
        self._cuda.reset_peak_memory_stats()

    def release_memory(self) -> None:
        gc.collect()
        self._cuda.empty_cache()


def expandable_segments(environment: Mapping[str, str]) -> bool:
    """Tell if torch's allocator uses expandable segments, from its variables. Pure."""
    setting = next((environment[name] for name in _ALLOCATOR if environment.get(name)), "")
    options = [option.strip() for option in setting.lower().split(",")]
    given = [option for option in options if option.startswith("expandable_segments:")]
    return bool(given) and given[-1].endswith(":true")
