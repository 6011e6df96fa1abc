"""Precisions: what each name means on each device, and proof that a model really is in it.

A precision names the format of the *weights*. fp32, fp16 and bf16 also compute in that format. The
quantised ones store the linear layers in 8 or 4 bits and leave embeddings, norms and the output
layer in bf16: autoregressive decoding reads every weight once a token, so bytes are time. Whether
the products themselves run in 8 bits (LLM.int8, fp8 on CUDA) or the weights are expanded to bf16
just before (weight-only) depends on the device; ``means`` says which.

``TABLE`` says what transformers itself does, ``ENGINE_TABLE`` where another engine does otherwise;
plan, schema and documentation print them, and nobody else knows. After loading,
``weights.inspect`` reads the storage of the weights and refuses a model that is something else.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workloads.errors import BadConfiguration, Unsupported

if TYPE_CHECKING:
    import torch

#: In the order of reports.
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
DEVICES = ("cpu", "cuda", "hpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a precision is on a device: how it is done, or why it cannot be."""

    supported: bool
    means: str = ""  # how weights are stored and multiplied, when supported
    reason: str = ""  # why not, when unsupported
    packages: tuple[str, ...] = ()  # what it needs installed, beyond torch and transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of the printed table."""

    precision: str
    device: str
    supported: bool
    text: str  # what it means, or why it is unsupported
    engine: str = ""  # "": transformers, and every engine without a line of its own


#: The engine that a job has unless its grid names another.
STOCK = "transformers"

_FROM_QUANT = "install it with: pip install 'nightgrid[quant]'"
_INSTALLED_BY = {
    "neural_compressor": "it is part of Habana's PyTorch image; elsewhere: "
    "pip install neural-compressor-pt"
}


def _yes(means: str, *packages: str) -> Support:
    return Support(supported=True, means=means, packages=packages)


def _no(reason: str) -> Support:
    return Support(supported=False, reason=reason)


_NF4 = "bitsandbytes NF4, 4-bit weights in blocks of 64, expanded to bf16 for each product"

TABLE: Mapping[tuple[str, str], Support] = {
    ("fp32", "cpu"): _yes("float32 weights and products"),
    ("fp32", "cuda"): _yes("float32 weights and products (TF32 off)"),
    ("fp32", "hpu"): _yes("float32 weights and products"),
    ("fp16", "cpu"): _yes("float16 weights and products; most CPUs convert, so slower than fp32"),
    ("fp16", "cuda"): _yes("float16 weights and products"),
    ("fp16", "hpu"): _yes("float16 weights and products; Gaudi2 or newer"),
    ("bf16", "cpu"): _yes("bfloat16 weights and products"),
    ("bf16", "cuda"): _yes("bfloat16 weights and products; compute capability 8.0 or newer"),
    ("bf16", "hpu"): _yes("bfloat16 weights and products"),
    ("fp8", "cpu"): _yes(
        "torchao float8 (e4m3) weight-only, expanded to bf16 for each product: real fp8 storage, "
        "emulated arithmetic",
        "torchao",
    ),
    ("fp8", "cuda"): _yes(
        "torchao float8 (e4m3) weights and activations, scaled as they come; fp8 products; "
        "compute capability 8.9 or newer",
        "torchao",
    ),
    ("fp8", "hpu"): _no(
        "fp8 on Gaudi is made by the Intel Neural Compressor in two passes, one that measures and "
        "one that quantises; this version has no engine that runs them"
    ),
    ("int8", "cpu"): _yes(
        "torchao int8 weight-only, one scale per output channel, bf16 products", "torchao"
    ),
    ("int8", "cuda"): _yes(
        "bitsandbytes LLM.int8(): int8 weights and activations, outliers in 16 bits",
        "bitsandbytes",
    ),
    ("int8", "hpu"): _no(
        "no int8 kernels for language models on Gaudi: the Intel Neural Compressor quantises to "
        "fp8 and uint4 there, and of bitsandbytes only NF4 works (its generic int8 path multiplies "
        "in float32)"
    ),
    ("int4", "cpu"): _yes(_NF4, "bitsandbytes"),
    ("int4", "cuda"): _yes(_NF4, "bitsandbytes"),
    ("int4", "hpu"): _yes(_NF4 + "; Gaudi2 or newer, eager mode", "bitsandbytes"),
}

#: What an engine does otherwise than transformers, by engine, precision and device.
ENGINE_TABLE: Mapping[tuple[str, str, str], Support] = {
    ("optimum-habana", "fp32", "hpu"): _yes(
        "float32 weights and products; static shapes, no key/value cache that is kept"
    ),
    ("optimum-habana", "fp16", "hpu"): _no(
        "optimum-habana generates in bfloat16 or float32 and its training arguments refuse fp16; "
        "write bf16"
    ),
    ("optimum-habana", "bf16", "hpu"): _yes(
        "bfloat16 weights and products; static shapes, a key/value cache that is kept"
    ),
    ("optimum-habana", "fp8", "hpu"): _yes(
        "Intel Neural Compressor, fp8 (e4m3) weights, activations and products with scales from a "
        "measurement on the same number of cards; the rest in bf16",
        "neural_compressor",
    ),
    ("optimum-habana", "int8", "hpu"): _no(
        "no int8 kernels for language models on Gaudi: the Intel Neural Compressor quantises to "
        "fp8 and uint4 there"
    ),
    ("optimum-habana", "int4", "hpu"): _yes(
        "uint4 weights of a checkpoint that is quantised already (GPTQ, AWQ, AutoRound), expanded "
        "to bf16 for each product; one card"
    ),
    **{
        ("graph", precision, device): _yes(
            f"{stored}, weights only, products in bf16"
            + ("; expanded for each product" if device == "cpu" else "")
        )
        for device in ("cpu", "cuda")
        for precision, stored in (
            ("fp8", "float8 (e4m3) with one scale per output channel"),
            ("int8", "int8 with one scale per output channel"),
            ("int4", "4-bit integers with one scale for 64 weights of a row"),
        )
    },
    **{
        (engine, precision, device): _no(
            f"{engine} takes {precision} from checkpoints that are in it; this version has no "
            "adapter for them"
        )
        for engine, device in (("vllm", "cuda"), ("vllm-gaudi", "hpu"))
        for precision in ("fp8", "int8", "int4")
    },
}

_DTYPE_NAMES = {"fp32": "float32", "fp16": "float16"}  # all others: bfloat16
_QUANTIZED = ("fp8", "int8", "int4")


def support(precision: str, device: str, engine: str = STOCK) -> Support:
    """What ``precision`` is on ``device`` (``cpu``, ``cuda`` or ``hpu``) with an engine.

    Raises:
        BadConfiguration: there is no such precision or device.
    """
    if precision not in PRECISIONS:
        raise BadConfiguration(f"no precision '{precision}'. There is: {', '.join(PRECISIONS)}.")
    if device not in DEVICES:
        raise BadConfiguration(f"no device '{device}'. There is: {', '.join(DEVICES)}.")
    return ENGINE_TABLE.get((engine, precision, device)) or TABLE[precision, device]


def table() -> tuple[TableRow, ...]:
    """Every precision on every device, in report order, for the schema and the documentation."""
    rows = []
    for precision in PRECISIONS:
        for device in DEVICES:
            entry = TABLE[precision, device]
            rows.append(_row(precision, device, entry))
            rows += [
                _row(precision, device, own, engine)
                for (engine, its, where), own in ENGINE_TABLE.items()
                if (its, where) == (precision, device)
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


def require(precision: str, device: str, engine: str = STOCK) -> Support:
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
    """Whether this precision stores linear layers in 8 or 4 bits."""
    return precision in _QUANTIZED


def loading_arguments(precision: str, device: str) -> dict[str, Any]:
    """Keyword arguments for transformers' ``from_pretrained``; ``finish_loading`` does the rest.

    Raises:
        Unsupported: not on this device, or a package is missing.
    """
    entry = require(precision, device)
    _quiet_libraries()
    arguments: dict[str, Any] = {_dtype_keyword(): compute_dtype(precision)}
    if "bitsandbytes" in entry.packages:
        arguments["quantization_config"] = _bitsandbytes(precision)
    return arguments


def finish_loading(model: Any, precision: str, device: str) -> None:
    """Quantise with torchao in place, on the device where the model lies; else nothing to do.

    Called directly and not through transformers' ``TorchAoConfig``: transformers 4.55 with torchao
    0.18 takes that, says nothing, and leaves the model in bf16.
    """
    if "torchao" not in support(precision, device).packages:
        return
    import torch
    from torchao.quantization import quantize_

    output = model.get_output_embeddings()

    def linear_inside(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and module is not output

    quantize_(model, _torchao(precision, device), linear_inside)


def _dtype_keyword() -> str:
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
    if device == "cuda":
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
