"""Intel Gaudi cards (HPU) through the Habana bridge ``habana_frameworks``.

Written from Habana's documentation and optimum-habana's sources; untested on a card. The bridge
reads its variables when torch is imported. Reading name or memory, or ``synchronize``, acquires the
card, which only one process can hold. There is no ``empty_cache``: after an out-of-memory error the
process must be replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from workloads.base import (
    CardFaulty,
    CardNotAcquired,
    CollectiveFailed,
    CompileFailed,
    OutOfMemory,
    Unsupported,
    supported,
    unsupported,
)
from workloads.devices import NF4, CardFacts, CardProcess, DeviceSpec, Texts, aligned_groups
from workloads.devices.base import (
    Compilations,
    Device,
    command_output,
    compiled_size_mib,
    installed_version,
    version_in,
)
from workloads.devices.monitor import gaudi
from workloads.devices.monitor.gaudi import PRODUCTS, intel_torch
from workloads.devices.monitor.host import CardTelemetry, CardUse

#: The bridge's variable: directory, whether to clear it at start, size in MiB.
RECIPE_CACHE = "PT_HPU_RECIPE_CACHE_CONFIG"

#: Order matters: a failed acquire also says "Generic failure", like a failed compilation.
_ERRORS: Texts = {
    CardFaulty: ("aip is lost", "hlml error with code 15"),  # HLML, and its Python package
    CardNotAcquired: ("device acquire failed", "device not found", "device already acquired"),
    OutOfMemory: (
        "module:pt_devmem allocation failed",
        "allocation failed for size::",
        "oom: no enough memory for defragment",
        "workspace allocation of size ::",  # of a graph, usual with large batches
    ),
    CompileFailed: (
        "graph compile failed",
        "graph creation failed",
        "graph duplication failed",  # after very many shapes
        "syngraphcompile",
        "synnodecreatewithid failed",
        "module:pt_lazy error",
    ),
    CollectiveFailed: (
        "hccl",
        "comm init rank error",
        "collective call returned error",
        "collective nonsfg",
    ),
}


def _variables(process: CardProcess) -> dict[str, str]:
    """Return the bridge's variables: always the mode, whose default differs by release."""
    lazy = process.kind.endswith("lazy")
    variables = {
        # Otherwise LOCAL_RANK is taken as an index into the list of one visible module.
        "HLS_MODULE_ID": str(process.card_index),
        "PT_HPU_LAZY_MODE": "1" if lazy else "0",
        "PT_HPU_ENABLE_CACHE_METRICS": "1",  # hits and misses of the recipe cache
    }
    if process.kind.endswith("compile"):
        variables["PT_ENABLE_INT64_SUPPORT"] = "1"  # as optimum-habana's own tests compile
    if lazy:  # on by default; retains every parameter ever moved to the card
        variables["PT_HPU_WEIGHT_SHARING"] = "0"
    # As optimum-habana's scripts do for generation on several cards, where graphs have collectives
    # ("collective nonSFG is not supported"). Its training leaves it out; a worker may do either.
    if lazy and process.cards > 1:
        variables["PT_HPU_ENABLE_LAZY_COLLECTIVES"] = "true"
    if process.compiled is not None:
        # The bridge's own key covers graph, data types and library versions.
        directory = f"{process.compiled}/{process.kind or 'ordinary'}-{process.cards}x"
        variables[RECIPE_CACHE] = f"{directory},false,{compiled_size_mib()}"
    return variables


def lacks_mode(mode: str, versions: Mapping[str, str]) -> str:
    """Return what an execution mode lacks with these package versions; "" if nothing."""
    torch = versions.get("torch", "")
    if mode == "lazy" and torch and not intel_torch(torch):
        return (
            f"lazy mode needs Intel's fork of torch, and there is stock torch {torch}: take the "
            "image pytorch-installer instead of pytorch-upstream-installer, or write hpu_mode: "
            "compile"
        )
    return ""


#: The bridge's metrics -> their counters -> names in rows.
_METRICS: Mapping[str, Mapping[str, str]] = {
    "graph_compilation": {"TotalNumber": "number", "TotalTime": "us"},
    "cpu_fallback": {"TotalNumber": "number"},
    "recipe_cache": {"TotalHit": "hits", "TotalMiss": "misses"},
}


SPEC = DeviceSpec(
    name="hpu",
    accelerator="HPU",
    title="Gaudi",
    summary="Intel Gaudi",
    also_called=("habana", "hl-"),
    handle=f"{__name__}:HpuDevice",
    order=10,
    ray_resource="HPU",
    ray_indices=True,
    registration="start Gaudi nodes with --resources "
    + " or ".join(
        f"""'{{"HPU": {gaudi.CARDS}, "accelerator_type:{product.ray_type}": 1}}'"""
        for product in PRODUCTS
    ),
    visible_variable="HABANA_VISIBLE_MODULES",
    container_variable="HABANA_VISIBLE_DEVICES",
    gang_visible=True,  # as documented by Habana; HLS_MODULE_ID selects the process's own card
    variables=_variables,
    groups=aligned_groups,
    server_cards=gaudi.CARDS,
    precisions={
        "fp32": supported("float32 weights and products"),
        "fp16": supported("float16 weights and products; Gaudi2 or newer"),
        "bf16": supported("bfloat16 weights and products"),
        "fp8": unsupported(
            "fp8 on Gaudi is made by the Intel Neural Compressor in two passes, one that measures "
            "and one that quantises"
        ),
        "int8": unsupported(
            "no int8 kernels for language models on Gaudi: the Intel Neural Compressor quantises "
            "to fp8 and uint4 there, and of bitsandbytes only NF4 works (its generic int8 path "
            "multiplies in float32)"
        ),
        "int4": supported(
            NF4 + "; Gaudi2 or newer, eager mode; Habana's image lacks bitsandbytes, which the "
            "extra hpu brings",
            "bitsandbytes",
        ),
    },
    capabilities=frozenset(
        {
            *("own_memory", "native_eager", "graphs", "pinned_memory"),
            *("fused_optimizer", "nf4_any_width", "compilation_counters", "exclusive"),
        }
    ),
    errors=_ERRORS,
    imports=("habana_frameworks.torch",),
    packages=("habana-torch-plugin",),
    tool="hl-smi",
    driver_command=("hl-smi", "-Q", "driver_version", "-f", "csv,noheader"),
    no_cards_remedy="is the driver loaded (`hl-smi` on the server, outside of the container), and "
    "was the container started with --runtime=habana and HABANA_VISIBLE_DEVICES=all?",
    examine=gaudi.examine_server,
    data_sheets=(
        (r"(Intel )?(Habana )?(HL-205\w*|Gaudi( ?1)?)", "Gaudi1"),
        *((product.pattern, product.name) for product in PRODUCTS),
    ),
)


def _bridge() -> Any:
    """Import ``habana_frameworks.torch.hpu``; raises CardNotAcquired if it is missing."""
    if recipes := os.environ.get(RECIPE_CACHE, "").partition(",")[0]:
        with contextlib.suppress(OSError):  # the only cost is compiling again
            os.makedirs(recipes, exist_ok=True)
    try:
        return importlib.import_module("habana_frameworks.torch.hpu")
    except ImportError as error:
        raise CardNotAcquired(
            "no Habana bridge here: the package habana_frameworks does not import "
            f"({error}). Run on a Gaudi node, in Habana's PyTorch image."
        ) from error


def _core(*names: str) -> Callable[..., Any]:
    """Return the bridge's function by the first name this release has; list the newest first."""
    core = importlib.import_module("habana_frameworks.torch.core")
    functions = [getattr(core, name) for name in names if hasattr(core, name)]
    if not functions:
        raise Unsupported(f"this release of habana_frameworks.torch.core has no {names[0]}")
    return cast("Callable[..., Any]", functions[0])


class HpuDevice(Device):
    """One Gaudi card."""

    spec = SPEC
    collective_backend = "hccl"
    compile_backend = "hpu_backend"
    compile_options: ClassVar[Mapping[str, Any]] = {"keep_input_mutations": True}  # of the KV cache

    @staticmethod
    def telemetry() -> Mapping[int, CardTelemetry]:
        readings = gaudi.hlml_telemetry() or gaudi.hl_smi_telemetry()  # which has no energy counter
        return gaudi.with_lost(readings)

    @staticmethod
    def compiler() -> str:
        versions = {name: installed_version(name) for name in ("habana-torch-plugin", "torch")}
        if not all(versions.values()):
            return ""
        names = sorted({card.name for card in gaudi.cards()})
        return "-".join([*(f"{name}-{version}" for name, version in versions.items()), *names])

    @staticmethod
    def inventory() -> Mapping[int, CardFacts]:
        return gaudi.hl_smi_inventory()

    @staticmethod
    def use(card_index: int) -> CardUse | None:
        return gaudi.hl_smi_use(card_index)

    def mismatch(self, card_index: int) -> str | None:
        opened = gaudi.opened_modules()
        if not opened or opened == {card_index}:
            return None
        has = ", ".join(map(str, sorted(opened)))
        return f"it has the cards with the module ids {has} open and was given {card_index}"

    def device_name(self) -> str:
        return str(_bridge().get_device_name())

    def driver_version(self) -> str:
        # hl-smi acquires no card; all cards of a node share one driver.
        return version_in(command_output(*SPEC.driver_command))

    def lacks(self, precision: str) -> str | None:
        if precision not in ("fp16", "int4"):
            return None
        name = self.device_name()
        if name.replace(" ", "").upper() in ("GAUDI", "HL-205", "GAUDI1"):
            return f"{name} is a first-generation card, {precision} needs Gaudi2 or newer"
        return None

    def cannot_compile(self) -> str | None:
        if self.lazy():
            return "this process is in lazy mode, in which the bridge makes graphs by itself"
        _bridge()  # registers the backend
        import torch

        if self.compile_backend in torch._dynamo.list_backends(exclude_tags=()):
            return None
        return f"this release of the bridge has no {self.compile_backend}"

    def synchronize(self) -> None:
        _bridge().synchronize()

    def capture_graphs(self, model: Any, **options: Any) -> Any:
        """Capture the model once per shape, in lazy mode; options of ``wrap_in_hpu_graph``."""
        return _bridge().wrap_in_hpu_graph(model, **options)

    def lazy(self) -> bool:
        """Tell if this process collects operations into graphs."""
        return os.environ.get("PT_HPU_LAZY_MODE") == "1"

    def before_quantized_loading(self) -> None:
        """Switch this process to inference mode, irreversibly: use a process kind of its own."""
        _core("hpu_inference_set_env", "hpu_set_inference_env", "hpu_set_env")()

    def after_quantized_loading(self, model: Any) -> None:
        """Mark the scales in a model's graphs as constants."""
        tell = _core("hpu_inference_initialize", "hpu_initialize")
        if "mark_scales" in inspect.signature(tell).parameters:
            tell(model, mark_scales=True, mark_non_scales=False)
        else:
            tell(model, mark_only_scales_as_const=True)

    def mark_step(self) -> None:
        importlib.import_module("habana_frameworks.torch.core").mark_step()

    def compilations(self) -> Compilations:
        known = super().compilations()
        counters: dict[str, float] = {}  # since their first reading
        with contextlib.suppress(ImportError):
            metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
            for metric, figures in _METRICS.items():
                found = metrics.metric_global(metric)
                stats = dict(found.stats()) if found is not None else {}
                for name in figures.keys() & stats.keys():
                    counters[f"{metric}_{figures[name]}"] = float(stats[name])
        if "graph_compilation_number" not in counters:
            return dataclasses.replace(known, graphs=None)  # a bridge without metrics
        fallbacks = counters.get("cpu_fallback_number")
        recalled = counters.get("recipe_cache_hits")
        return Compilations(
            graphs=(known.graphs or 0) + int(counters["graph_compilation_number"]),
            compile_s=counters.get("graph_compilation_us", 0.0) / 1e6,
            recalled=None if recalled is None else int(recalled),
            cpu_fallbacks=None if fallbacks is None else int(fallbacks),
            named={**known.named, **counters},
        )

    def stamp(self) -> Any:
        return None  # operations run later as graphs; only whole steps can be timed

    def fused_adamw(self, parameters: Sequence[Any], *, lr: float, weight_decay: float) -> Any:
        optimizers = importlib.import_module("habana_frameworks.torch.hpex.optimizers")
        return optimizers.FusedAdamW(parameters, lr=lr, weight_decay=weight_decay)

    def memory_limit_bytes(self) -> int | None:
        return int(_bridge().memory_stats()["Limit"])

    def peak_memory_bytes(self) -> int | None:
        return int(_bridge().memory_stats()["MaxInUse"])

    def reset_peak_memory(self) -> None:
        _bridge().reset_peak_memory_stats()

    def register_collective(self) -> None:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self.card_random().manual_seed_all(seed)

    def card_random(self) -> Any:
        return importlib.import_module("habana_frameworks.torch.hpu.random")
