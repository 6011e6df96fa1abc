"""Precisions: what each name means on each device, and proof that a model really is in it.

A precision names the format of the *weights*. fp32, fp16 and bf16 also compute in that format. The
quantised ones store the linear layers in 8 or 4 bits and leave embeddings, norms and the output
layer in bf16: autoregressive decoding reads every weight once a token, so bytes are time. Whether
the products themselves run in 8 bits (LLM.int8, fp8 on CUDA) or the weights are expanded to bf16
just before (weight-only) depends on the device; ``means`` says which.

Each device says what the default engine does there, ``EngineSpec.precisions`` where another engine
does otherwise; plan, schema and documentation print them, and nobody else knows. After loading,
``inspect`` reads the storage of the weights and refuses a model that is something else.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, Support, Unsupported
from workloads.devices import DEVICES, device_spec
from workloads.models.products import origin_of
from workloads.registry import ENGINES, engines_for

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workloads.devices.base import Device

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


#: By packages that another command installs.
_INSTALLED_BY = {
    "neural_compressor": "it is part of Habana's PyTorch image; elsewhere: "
    "pip install neural-compressor-pt"
}


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
    chosen = ENGINES.get(engine)
    if chosen is not None and ability not in chosen.abilities:
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
    engines = engines_for(None)
    cells = [
        (precision, device, engine, support(precision, device, engine, "generate"))
        for precision in PRECISIONS
        for device in DEVICES
        for engine in ("", *engines)
        if not engine or (precision, device) in ENGINES[engine].precisions
    ]
    return tuple(
        TableRow(
            precision=precision,
            device=device,
            supported=cell.supported,
            text=cell.means if cell.supported else cell.reason,
            engine=engine,
        )
        for precision, device, engine, cell in cells
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
            usual = "install it with: pip install 'nightgrid[quant]'"
            raise Unsupported(
                f"{precision} on {device} needs the package '{package}', which is not installed "
                f"here; {_INSTALLED_BY.get(package, usual)}"
            )
    return entry


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of activations, and of the weights that are not quantised."""
    import torch

    plain = {"fp32": torch.float32, "fp16": torch.float16}
    return plain.get(precision, torch.bfloat16)


def quantized(precision: str) -> bool:
    """Tell if this precision stores linear layers in 8 or 4 bits."""
    return precision in _STORAGE


def loading_arguments(precision: str, device: str) -> dict[str, Any]:
    """Keyword arguments for transformers' ``from_pretrained``; ``finish_loading`` does the rest.

    Raises:
        Unsupported: not on this device, or a package is missing.
    """
    entry = require(precision, device)
    # LLM.int8 casts bf16 activations itself, and warns each time.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    # Recommends a package that would fetch another kernel from a hub while jobs run.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    arguments: dict[str, Any] = {dtype_keyword(): compute_dtype(precision)}
    if "bitsandbytes" in entry.packages:
        from transformers import BitsAndBytesConfig

        arguments["quantization_config"] = (
            BitsAndBytesConfig(load_in_8bit=True)
            if precision == "int8"
            else BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=compute_dtype("bf16"),
            )
        )
    return arguments


def finish_loading(model: Any, precision: str, device: str) -> None:
    """Quantise with torchao in place, on the device where the model lies; else nothing to do.

    Called directly and not through transformers' ``TorchAoConfig``: transformers 4.55 with torchao
    0.18 takes that, says nothing, and leaves the model in bf16.
    """
    if "torchao" not in support(precision, device).packages or quantized_already(model.config):
        return
    import torch
    from torchao import quantization

    if precision == "int8":
        config = quantization.Int8WeightOnlyConfig()
    elif device_spec(device).can("fp8_products"):
        config = quantization.Float8DynamicActivationFloat8WeightConfig()
    else:
        config = quantization.Float8WeightOnlyConfig()
    output = model.get_output_embeddings()
    quantization.quantize_(
        model,
        config,
        lambda module, name: isinstance(module, torch.nn.Linear) and module is not output,
    )


def quantized_already(config: Any) -> bool:
    """Tell if a checkpoint says how it is quantised: it is loaded as it is."""
    return bool(getattr(config, "quantization_config", None))


def dtype_keyword() -> str:
    """4.55 knows only ``torch_dtype``; 5 takes it too, with a warning at every load."""
    import transformers

    return "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"


# Examine a loaded model's weights as stored: their bytes, their count, their format.
#
# A library may leave layers out or fall back without an error, and a table would then call a bf16
# model "int4". So the storage itself is read: tensor subclasses of torchao are opened down to their
# plain tensors, bitsandbytes' packed weights are counted with their scales, and a model that is not
# in the precision asked for is refused.

#: dtype of the stored values of each quantised format; int4 packs two values in a byte.
_STORAGE = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}

#: NF4 kernels of bitsandbytes for CPUs take rows of whole blocks of this many values.
NF4_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """Weights of a loaded model."""

    weight_bytes: int  # as stored, with scales; tied weights once
    parameter_count: int  # logical, tied weights once
    quantized_share: float  # of all parameters, those in the quantised format
    detail: str  # for the row: what the precision meant here


def stored_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor keeps its data in, itself if it is plain.

    Covers torchao's tensor subclasses (``__tensor_flatten__``) and the scales that bitsandbytes
    hangs on its parameters (``quant_state``, ``SCB``).
    """
    import torch

    if not hasattr(type(tensor), "__tensor_flatten__") and hasattr(
        type(tensor.data), "__tensor_flatten__"
    ):
        tensor = tensor.data  # of a Parameter around a subclass
    if hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a divided tensor names its cards too
                yield from stored_tensors(inner)
        return
    yield tensor
    if (state := getattr(tensor, "quant_state", None)) is not None:
        yield state.absmax
        if getattr(state, "nested", False):
            yield state.state2.absmax
    if isinstance(scales := getattr(tensor, "SCB", None), torch.Tensor):
        yield scales


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's data with its scales."""
    return sum(part.numel() * part.element_size() for part in stored_tensors(tensor))


def logical_count(tensor: torch.Tensor) -> int:
    """Number of weights that a tensor stands for, however they are packed."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        return math.prod(map(int, state.shape))
    return int(tensor.numel())


def stored_format(tensor: torch.Tensor) -> str:
    """dtype of the largest plain tensor inside, e.g. ``int8`` for a torchao int8 weight."""
    largest = max(stored_tensors(tensor), key=lambda part: part.numel() * part.element_size())
    return str(largest.dtype).removeprefix("torch.")


def _in_format(tensor: torch.Tensor, precision: str) -> bool:
    """Tell if a matrix is stored in a quantised format: a byte each for torchao's int4 on a CPU,
    which is of that format and not of its size."""
    stored = stored_format(tensor)
    if stored == "int8" and getattr(tensor, "target_dtype", None) is not None:
        return precision == str(tensor.target_dtype).removeprefix("torch.")  # type: ignore[attr-defined]
    return stored == _STORAGE.get(precision)


def inspect(model: nn.Module, precision: str, device: str, engine: str = "") -> ModelWeights:
    """Read the storage of all weights and make sure that they are in ``precision``.

    Raises:
        BadConfiguration: the model is not in the precision asked for.
    """
    parameters = _unique_parameters(model)
    matrices = {
        name: tensor
        for name, tensor in parameters.items()
        if tensor.dim() >= 2 or getattr(tensor, "quant_state", None) is not None
    }
    packed = _packed_layers(model)
    in_packed = sum(_packed_count(model.get_submodule(name)) for name in packed)
    quantized_count = in_packed + sum(
        logical_count(tensor) for tensor in matrices.values() if _in_format(tensor, precision)
    )
    count = in_packed + sum(logical_count(tensor) for tensor in parameters.values())
    share = quantized_count / count if count else 0.0
    detail = support(precision, device, engine).means
    if quantized(precision):
        wrong = _unquantized(model, matrices, precision, bool(packed) and precision == "int4")
        detail += f"; {share:.0%} of the parameters, the rest in bf16"
    else:
        wrong = _quantized(matrices, precision, list(packed))
    if wrong:
        raise BadConfiguration(f"the model was asked for in {precision}{wrong}")
    return ModelWeights(
        weight_bytes=sum(map(stored_bytes, (*parameters.values(), *chain(*packed.values())))),
        parameter_count=count,
        quantized_share=share,
        detail=detail,
    )


def _packed_layers(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Layers whose 4-bit weights lie in buffers, by name: that buffer, then those of zero points
    and scales. So do the layers for GPTQ's, AWQ's and AutoRound's checkpoints: eight weights to an
    int32, or in the order of a processor's kernels, scales among them.
    """
    layers = {}
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if "qweight" in buffers and not buffers["qweight"].is_floating_point():
            parts = ("qweight", "qzeros", "scales")
            layers[name] = [buffers[part] for part in parts if part in buffers]
    return layers


def _packed_count(layer: nn.Module) -> int:
    sizes = getattr(layer, "infeatures", None), getattr(layer, "outfeatures", None)
    if isinstance(sizes[0], int) and isinstance(sizes[1], int):
        return sizes[0] * sizes[1]
    return int(layer.get_buffer("qweight").numel()) * 8  # weights in an int32


def card_weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that this card holds: all of a model's, or its part of them."""
    return sum(
        # DeepSpeed's ZeRO 3 empties a parameter and hangs this card's part on it.
        stored_bytes(getattr(tensor, "ds_tensor", tensor))
        for tensor in _unique_parameters(model).values()
    )


def check_shapes(model_config: Any, precision: str, device: str) -> None:
    """Refuse NF4 for a model whose rows are not whole blocks, where kernels want such.

    Raises:
        Unsupported: the kernels would fail in the middle of the first product.
    """
    spec = device_spec(device)
    if precision != "int4" or spec.can("nf4_any_width"):
        return
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(model_config, name, None)
        if isinstance(size, int) and size % NF4_BLOCK:
            raise Unsupported(
                f"int4 on {device} needs every size to be a multiple of {NF4_BLOCK}; this model's "
                f"{name} is {size}"
            )


def _unique_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name, tied ones once."""
    return dict(model.named_parameters(remove_duplicate=True))


def _quantized(matrices: dict[str, torch.Tensor], precision: str, packed: Sequence[str]) -> str:
    """What is wrong with a model that should be plain: a layer is packed or of another format."""
    if packed:
        return (
            f", but {len(packed)} of its layers are packed in 4 bits (e.g. {packed[0]}): write "
            "precision: int4"
        )
    dtype = str(compute_dtype(precision)).removeprefix("torch.")
    formats = {name: stored_format(tensor) for name, tensor in matrices.items()}
    others = {name: stored for name, stored in formats.items() if stored != dtype}
    if not others:
        return ""
    counts = ", ".join(f"{stored} in {n}" for stored, n in Counter(others.values()).items())
    return (
        f" ({dtype}), but {len(others)} of its {len(matrices)} weight matrices are not: {counts} "
        f"(e.g. {next(iter(others))}). A checkpoint that is quantised already has one precision "
        "only."
    )


def _unquantized(
    model: nn.Module, matrices: dict[str, torch.Tensor], precision: str, packed: bool
) -> str:
    """What is wrong with a quantised model: every matrix of a linear layer, except the output
    layer's, must be in the format."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if "Linear" in type(module).__name__ and module is not output
    } & set(matrices)
    left_out = sorted(name for name in linear if not _in_format(matrices[name], precision))
    if left_out:
        stored = stored_format(matrices[left_out[0]])
        return (
            f", but {len(left_out)} of its {len(linear)} linear layers are not (e.g. {left_out[0]} "
            f"is {stored})"
        )
    return "" if linear or packed else ", but it has no linear layer that the library quantises"


# Products in int8: torchao multiplies int8 weights by activations in int8 (static quantization).
#
# The range of each layer's input is measured on texts once, and one scale a layer follows from it.
# The ranges lie in the note beside a saved model, since transformers reads weights of torchao
# without them; whoever does not know them multiplies the same weights in 16 bits.

#: Their entry in the note of a saved model.
RANGES_NOTE = "activation_ranges"

#: A layer's largest absolute input, and the dimensions that its inputs have, by its name.
Ranges = Mapping[str, tuple[float, int]]


def watch_inputs(
    model: Any,
    layers: Mapping[str, torch.nn.Module],
    texts: Sequence[Sequence[int]],
    device: Device,
    see: Callable[[str, torch.Tensor], None],
) -> None:
    """Let a model read texts, and show ``see`` every input of these layers."""
    import torch

    def showing(name: str) -> Any:
        return lambda _, inputs: see(name, inputs[0].detach())

    hooks = [layer.register_forward_pre_hook(showing(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            for ids in texts:
                model(input_ids=torch.tensor([ids], device=device.torch_device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def measure_ranges(model: Any, texts: Sequence[Sequence[int]], device: Device) -> Ranges:
    """Ranges of the inputs of each linear layer that the texts reach."""
    import torch

    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    ranges: dict[str, tuple[float, int]] = {}

    def see(name: str, tensor: torch.Tensor) -> None:
        largest = max(float(tensor.abs().max()), ranges.get(name, (0.0, 0))[0])
        ranges[name] = (largest, tensor.dim())

    watch_inputs(model, layers, texts, device, see)
    return ranges


def use_ranges(model: Any, ranges: Ranges) -> int:
    """Have layers whose weights torchao stores in int8 multiply in int8; their number.

    Raises:
        Unsupported: torchao is missing, or older than static activations.
    """
    import torch

    try:
        from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerRow, PerTensor
    except ImportError as error:
        raise Unsupported(
            f"static activations need torchao 0.18: pip install 'nightgrid[quant]' ({error})"
        ) from error
    config = Int8StaticActivationInt8WeightConfig(
        granularity=[PerTensor(), PerRow()], set_inductor_config=False
    )
    count = 0
    for name, (largest, dimensions) in ranges.items():
        weight: Any = getattr(model.get_submodule(name), "weight", None)
        if not hasattr(weight, "act_quant_scale"):
            continue  # it stays in 16 bits, as the output layer does
        scale = max(largest, torch.finfo(torch.float32).tiny) / 127  # int8's largest
        weight.act_quant_scale = torch.full([1] * dimensions, scale, device=weight.device)
        weight.act_quant_kwargs = config.get_act_quant_kwargs()
        count += 1
    return count


def forget_ranges(model: Any) -> None:
    """Leave the weights alone, which is how transformers writes and reads them."""
    for parameter in model.parameters():
        if hasattr(parameter, "act_quant_scale"):
            parameter.act_quant_scale = parameter.act_quant_kwargs = None


def restore_ranges(model: Any, directory: Path) -> Any:
    """The model, with the ranges in the note beside it; as it is where there are none."""
    noted = origin_of(directory).get(RANGES_NOTE)
    if isinstance(noted, dict):
        use_ranges(model, {name: (float(most), int(dims)) for name, (most, dims) in noted.items()})
    return model
