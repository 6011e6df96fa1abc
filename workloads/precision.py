"""Precisions: what each name means on each device, and proof that a model really is in it.

A precision names the format of the *weights*. fp32, fp16 and bf16 also compute in that format. The
quantised ones store the linear layers in 8 or 4 bits and leave embeddings, norms and the output
layer in bf16: autoregressive decoding reads every weight once a token, so bytes are time. Whether
the products themselves run in 8 bits (LLM.int8, fp8 on CUDA) or the weights are expanded to bf16
just before (weight-only) depends on the device; ``means`` says which.

Each device says what the default engine does there, ``EngineSpec.precisions`` where another engine
does otherwise; plan, schema and documentation print them, and nobody else knows. After loading,
``weights.inspect`` reads the storage of the weights and refuses a model that is something else.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, Support, Unsupported
from workloads.devices import DEVICES, device_spec
from workloads.engines import ENGINES, engines_for

if TYPE_CHECKING:
    import torch

#: In the order of reports.
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
#: Names of the same formats elsewhere, for whoever writes one of them in a grid.
ALSO_CALLED = {
    "float32": "fp32",
    "f32": "fp32",
    "tf32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "e4m3": "fp8",
    "8bit": "int8",
    "nf4": "int4",
    "fp4": "int4",
    "4bit": "int4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of the printed table."""

    precision: str
    device: str
    supported: bool
    text: str  # what it means, or why it is unsupported
    engine: str = ""  # "": every engine without a line of its own


_FROM_QUANT = "install it with: pip install 'nightgrid[quant]'"
_INSTALLED_BY = {
    "neural_compressor": "it is part of Habana's PyTorch image; elsewhere: "
    "pip install neural-compressor-pt"
}

_DTYPE_NAMES = {"fp32": "float32", "fp16": "float16"}  # all others: bfloat16
_QUANTIZED = ("fp8", "int8", "int4")


def support(precision: str, device: str, engine: str = "", ability: str | None = None) -> Support:
    """Support of ``precision`` on a device, given by name, with an engine or the default one. Where
    there is none, the reason names the engines with this ability that have it.

    Raises:
        BadConfiguration: there is no such precision or device.
    """
    if precision not in PRECISIONS:
        raise BadConfiguration(f"no precision '{precision}'. There is: {', '.join(PRECISIONS)}.")
    entry = _declared(precision, device, engine)
    others = [] if entry.supported else _engines_that_do(precision, device, engine, ability)
    if not others:
        return entry
    plural = "s" if len(others) > 1 else ""
    verb = "generate" if ability == "generate" else "work"
    does = f"the engine{plural} {' and '.join(others)} {verb}{'' if plural else 's'} in it there"
    return replace(entry, reason=f"{entry.reason}; {does}")


def _declared(precision: str, device: str, engine: str) -> Support:
    """An engine's own cell, else the device's."""
    spec = ENGINES.get(engine) if engine else None
    own = spec.precisions.get((precision, device)) if spec is not None else None
    return own or device_spec(device).precision(precision)


def _engines_that_do(precision: str, device: str, engine: str, ability: str | None) -> list[str]:
    """The engines with an ability in a precision on a device, the default first; none beside an
    engine without the ability."""
    asked = ENGINES.get(engine)
    if asked is not None and ability not in asked.abilities:
        return []
    return [
        spec.name
        for spec in sorted(ENGINES.known(), key=lambda spec: not spec.default)
        if ability in spec.abilities
        and spec.runs_on(device)
        and _declared(precision, device, spec.name).supported
    ]


def table() -> tuple[TableRow, ...]:
    """Every precision on every device, in report order, for the schema and the documentation."""
    rows = []
    engines = engines_for(None)
    for precision in PRECISIONS:
        for device in DEVICES:
            own = [name for name in engines if (precision, device) in ENGINES[name].precisions]
            rows += [
                _row(precision, device, support(precision, device, name, "generate"), name)
                for name in ("", *own)
            ]
    return tuple(rows)


def _row(precision: str, device: str, entry: Support, engine: str = "") -> TableRow:
    return TableRow(
        precision=precision,
        device=device,
        supported=entry.supported,
        text=entry.means if entry.supported else entry.reason,
        engine=engine,
    )


def require(precision: str, device: str, engine: str = "") -> Support:
    """Like ``support``, for the process that is about to load a model.

    Raises:
        Unsupported: the table has no such combination, or a package it needs is missing here.
        BadConfiguration: there is no such precision or device.
    """
    entry = support(precision, device, engine)
    if not entry.supported:
        raise Unsupported(f"{precision} on {device}: {entry.reason}.")
    for package in entry.packages:
        if importlib.util.find_spec(package) is None:
            raise Unsupported(
                f"{precision} on {device} needs the package '{package}', which is not installed "
                f"here; {_INSTALLED_BY.get(package, _FROM_QUANT)}"
            )
    return entry


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of activations, and of the weights that are not quantised."""
    import torch

    dtype: torch.dtype = getattr(torch, _DTYPE_NAMES.get(precision, "bfloat16"))
    return dtype


def quantized(precision: str) -> bool:
    """Tell if this precision stores linear layers in 8 or 4 bits."""
    return precision in _QUANTIZED


def loading_arguments(precision: str, device: str) -> dict[str, Any]:
    """Keyword arguments for transformers' ``from_pretrained``; ``finish_loading`` does the rest.

    Raises:
        Unsupported: not on this device, or a package is missing.
    """
    entry = require(precision, device)
    _quiet_libraries()
    arguments: dict[str, Any] = {dtype_keyword(): compute_dtype(precision)}
    if "bitsandbytes" in entry.packages:
        arguments["quantization_config"] = _bitsandbytes(precision)
    return arguments


def finish_loading(model: Any, precision: str, device: str) -> None:
    """Quantise with torchao in place, on the device where the model lies; else nothing to do.

    Called directly and not through transformers' ``TorchAoConfig``: transformers 4.55 with torchao
    0.18 takes that, says nothing, and leaves the model in bf16.
    """
    if "torchao" not in support(precision, device).packages or quantized_already(model.config):
        return
    import torch
    from torchao.quantization import quantize_

    output = model.get_output_embeddings()

    def linear_inside(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and module is not output

    quantize_(model, _torchao(precision, device), linear_inside)


def quantized_already(config: Any) -> bool:
    """Tell if a checkpoint says how it is quantised: it is loaded as it is."""
    return bool(getattr(config, "quantization_config", None))


def dtype_keyword() -> str:
    """4.55 knows only ``torch_dtype``; 5 takes it too, with a warning at every load."""
    import transformers

    return "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"


def _quiet_libraries() -> None:
    """Silence what would be said at every product or import and asks nothing of anybody."""
    # LLM.int8 casts bf16 activations itself, and warns each time.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    # Recommends a package that would fetch another kernel from a hub while jobs run.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _torchao(precision: str, device: str) -> Any:
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
    )

    if precision == "int8":
        return Int8WeightOnlyConfig()
    if device_spec(device).can("fp8_products"):
        return Float8DynamicActivationFloat8WeightConfig()
    return Float8WeightOnlyConfig()


def _bitsandbytes(precision: str) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
