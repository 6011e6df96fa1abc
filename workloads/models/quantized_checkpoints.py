"""Checkpoints that others have quantised: the package that reads each kind, and its precision.

GPTQ's, AWQ's and AutoRound's 4 bits are unpacked for each product, by AutoRound's layers: the
libraries of GPTQ and AWQ do not install beside this transformers, and the three pack alike. On the
host these are AutoRound's layers in torch, also where auto-round-lib is installed: its kernels
(0.16.0) compute other values once torch uses fewer threads than when they began, which jobs do.
compressed-tensors, and fp8 on a device without products in fp8, would be expanded to 16 bits at the
first product: that is done at loading, so that a row says what it ran in.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workloads.base import Unsupported
from workloads.devices import DeviceSpec
from workloads.models.saved import origin_of


def _as_auto_round(on_host: bool, found: Mapping[str, Any]) -> Any:
    from transformers import AutoRoundConfig

    return AutoRoundConfig(backend="torch" if on_host else "auto")


def _expanded(on_host: bool, found: Mapping[str, Any]) -> Any:
    import inspect

    from transformers import CompressedTensorsConfig

    known = inspect.signature(CompressedTensorsConfig).parameters
    arguments: dict[str, Any] = {"dequantize": True}
    if "dequantize" not in known:  # transformers 4.55
        arguments = {"run_compressed": False}
    return CompressedTensorsConfig(**arguments)


def _expanded_fp8(on_host: bool, found: Mapping[str, Any]) -> Any:
    import inspect

    import transformers

    kind = transformers.FineGrainedFP8Config
    if "dequantize" not in inspect.signature(kind).parameters:
        raise Unsupported(
            f"transformers {transformers.__version__} expands no fp8 checkpoint to 16 or 32 bits; "
            "releases do whose FineGrainedFP8Config takes `dequantize` (5.23 does)"
        )
    # With the checkpoint's other values: transformers takes more from here than `dequantize`.
    return kind.from_dict({**found, "dequantize": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The package for a kind of checkpoint; "" is transformers alone."""

    module: str = ""
    package: str = ""  # as pip calls it
    install: str = ""
    packed: bool = False  # in 4 bits, as AutoRound's layers unpack them
    #: For from_pretrained, in place of the checkpoint's: of whether it is for the host, and of what
    #: the checkpoint says.
    config: Callable[[bool, Mapping[str, Any]], Any] | None = None
    on_host: bool = True  # whether it is read on the host, too


_AUTO_ROUND = Reader(
    module="auto_round",
    package="auto-round",
    install="pip install 'nightgrid[auto-round]' (Python 3.11 and newer)",
    packed=True,
    config=_as_auto_round,
)
#: By how a checkpoint's config.json names its quantisation.
READERS = {
    "gptq": _AUTO_ROUND,
    "awq": replace(_AUTO_ROUND, on_host=False),  # AutoRound has no layers in torch for it
    "auto-round": _AUTO_ROUND,
    "intel/auto-round": _AUTO_ROUND,
    "compressed-tensors": Reader(
        module="compressed_tensors",
        package="compressed-tensors",
        install="pip install 'nightgrid[compressed-tensors]'",
        config=_expanded,
    ),
    "fp8": Reader(config=_expanded_fp8),
}
#: Kinds in 4 bits.
PACKED = tuple(name for name, reader in READERS.items() if reader.packed)
#: The packages of all readers, as pip calls them, and what each is for.
PACKAGES = {
    each.package: (each.install, [n for n, other in READERS.items() if other.module == each.module])
    for each in READERS.values()
    if each.package
}
_EXPANDED = ("bf16", "fp16", "fp32")


def bits_of(found: Mapping[str, Any]) -> int:
    """Bits of the weights of a packed checkpoint, of its ``quantization_config``."""
    return int(found.get("bits", found.get("w_bit", 4)))


def unreadable(config: Mapping[str, Any]) -> str:
    """The reason why no task loads a checkpoint of this config.json; "" where it may. Engines with
    a loader of their own refuse for themselves."""
    found = config.get("quantization_config") or {}
    method = str(found.get("quant_method", ""))
    reader = READERS.get(method)
    if reader is None or not reader.packed:
        return ""
    if (bits := bits_of(found)) != 4:
        return f"it is a {method} checkpoint in {bits} bits, and 4 are read"
    if found.get("desc_act") and not found.get("static_groups"):
        return "its inputs are reordered (desc_act), which no library reads that runs here"
    return ""


def precisions_of(
    config: Mapping[str, Any], directory: Path, device: DeviceSpec
) -> tuple[str, ...]:
    """Precisions that a job with a quantised checkpoint may ask for; none: any, or unknown."""
    found = config.get("quantization_config") or {}
    method = str(found.get("quant_method", ""))
    if not found:
        return ()
    if own := origin_of(directory).get("precision"):
        return (str(own),)
    if method == "bitsandbytes":
        return ("int4",) if found.get("load_in_4bit") else ("int8",)
    if method not in READERS:
        return ()
    if READERS[method].packed:
        return ("int4",)
    fp8 = method == "fp8" and device.can("fp8_products")
    return ("fp8", *_EXPANDED) if fp8 else _EXPANDED


def kind_of(config: Any) -> str:
    """The kind of a quantised checkpoint of this transformers' config, in words."""
    found = config.quantization_config
    method = found.get("quant_method") if isinstance(found, Mapping) else found.quant_method
    return f"{method} checkpoint"


def reading_arguments(
    config: Mapping[str, Any], model: str, *, on_host: bool = True
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a checkpoint of this config.json.

    Raises:
        Unsupported: the package that reads it is missing, or none does.
    """
    found = config.get("quantization_config") or {}
    method = str(found.get("quant_method", ""))
    if (reader := READERS.get(method)) is None:
        return {}
    if reason := unreadable(config):
        raise Unsupported(f"{model} cannot be read: {reason}")
    if on_host and not reader.on_host:
        raise Unsupported(f"{model} is a {method} checkpoint, which is read on cards only")
    if reader.module and importlib.util.find_spec(reader.module) is None:
        raise Unsupported(
            f"{model} is a {method} checkpoint, which needs the package {reader.module}: "
            f"{reader.install}"
        )
    return {"quantization_config": reader.config(on_host, found)} if reader.config else {}


def as_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a checkpoint that is not to be expanded."""
    found = config.get("quantization_config") or {}
    if found.get("quant_method") != "fp8":
        return {}  # the others are read in one way only
    from transformers import FineGrainedFP8Config

    return {"quantization_config": FineGrainedFP8Config.from_dict(dict(found))}
