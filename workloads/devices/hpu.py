"""Intel Gaudi cards (HPU) through the Habana bridge ``habana_frameworks``.

Written after Habana's documentation and optimum-habana's sources; nobody has run it on a card yet.
The bridge reads its variables when torch is imported, so ``environment`` must be set before. Asking
for name, memory or ``synchronize`` acquires the card, and only one process can hold it. Memory is
never handed back to the card inside a process (there is no ``empty_cache``): after an out-of-memory
the process has to be replaced.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from workloads.devices import hl_smi, hlml
from workloads.devices.base import (
    HOST_ALLOCATOR_TEXTS,
    Device,
    Texts,
    by_text,
    command_output,
    headline,
)
from workloads.devices.telemetry import CardTelemetry
from workloads.errors import CardNotAcquired, CollectiveFailed, CompileFailed, OutOfMemory

#: In this order: a failed acquire also says "Generic failure", as a failed compilation does.
_TEXTS: tuple[Texts, ...] = (
    (CardNotAcquired, ("device acquire failed", "device not found", "device already acquired")),
    (
        OutOfMemory,
        (
            "module:pt_devmem allocation failed",
            "allocation failed for size::",
            "oom: no enough memory for defragment",
        ),
    ),
    (CompileFailed, ("graph compile failed", "syngraphcompile", "module:pt_lazy error")),
    (CollectiveFailed, ("hccl", "collective call returned error")),
)


def _bridge() -> Any:
    """``habana_frameworks.torch.hpu``; raises CardNotAcquired where the bridge is missing."""
    try:
        return importlib.import_module("habana_frameworks.torch.hpu")
    except ImportError as error:
        raise CardNotAcquired(
            "no Habana bridge here: the package habana_frameworks does not import "
            f"({error}). Run on a Gaudi node, in Habana's PyTorch image."
        ) from error


class HpuDevice(Device):
    """One Gaudi card."""

    name = "hpu"
    collective_backend = "hccl"
    compile_backend = "hpu_backend"

    @staticmethod
    def environment(
        card_index: int,
        *,
        threads: int | None = None,
        lazy: bool = False,
        recipe_cache: str | None = None,
    ) -> dict[str, str]:
        """Show one module and fix the execution mode.

        Args:
            card_index: module id of the card, 0 to 7.
            threads: OpenMP threads.
            lazy: graph collection (what optimum-habana's text generation expects) instead of
                eager mode. Always set, since its default changed between software versions.
            recipe_cache: directory where processes share compiled graphs (1 GiB, kept).
        """
        variables = {
            "HABANA_VISIBLE_MODULES": str(card_index),
            # Without it the bridge takes LOCAL_RANK as an index into the one-entry list above.
            "HLS_MODULE_ID": str(card_index),
            "PT_HPU_LAZY_MODE": "1" if lazy else "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        if recipe_cache is not None:
            variables["PT_HPU_RECIPE_CACHE_CONFIG"] = f"{recipe_cache},false,1024"
        return variables

    @staticmethod
    def telemetry() -> Mapping[int, CardTelemetry]:
        return hlml.telemetry() or hl_smi.telemetry()  # the tool knows no energy

    @staticmethod
    def occupied(card_index: int) -> str | None:
        return hl_smi.occupied(card_index)

    def device_name(self) -> str:
        return str(_bridge().get_device_name())

    def driver_version(self) -> str:
        # hl-smi does not acquire the card. All cards of a node share one driver.
        lines = command_output("hl-smi", "-Q", "driver_version", "-f", "csv,noheader").splitlines()
        return lines[0].strip() if lines else ""

    def lacks(self, precision: str) -> str | None:
        if precision not in ("fp16", "int4"):
            return None
        name = self.device_name()
        if name.replace(" ", "").upper() in ("GAUDI", "HL-205", "GAUDI1"):
            return f"{name} is a first-generation card, {precision} needs Gaudi2 or newer"
        return None

    def synchronize(self) -> None:
        _bridge().synchronize()

    def mark_step(self) -> None:
        importlib.import_module("habana_frameworks.torch.core").mark_step()

    def stamp(self) -> Any:
        return None  # operations are collected and run later; only whole steps have a time

    def fused_adamw(self, parameters: Sequence[Any], *, lr: float, weight_decay: float) -> Any:
        optimizers = importlib.import_module("habana_frameworks.torch.hpex.optimizers")
        return optimizers.FusedAdamW(parameters, lr=lr, weight_decay=weight_decay)

    def memory_limit_bytes(self) -> int | None:
        return int(_bridge().memory_stats()["Limit"])

    def peak_memory_bytes(self) -> int | None:
        return int(_bridge().memory_stats()["MaxInUse"])

    def reset_peak_memory(self) -> None:
        _bridge().reset_peak_memory_stats()

    def release_memory(self) -> None:
        gc.collect()

    def register_collective(self) -> None:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")

    def seed(self, seed: int) -> None:
        super().seed(seed)
        importlib.import_module("habana_frameworks.torch.hpu.random").manual_seed_all(seed)

    def classify(self, error: BaseException) -> BaseException:
        if isinstance(error, RuntimeError) and any(
            text in str(error).lower() for text in HOST_ALLOCATOR_TEXTS
        ):
            return MemoryError(headline(error))  # the host's memory, not the card's
        return by_text(error, _TEXTS) or super().classify(error)
