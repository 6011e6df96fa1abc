"""Precisions: their meaning on each device, and checks that a model really is in one.

A precision names the format of the *weights*. fp32, fp16 and bf16 also compute in it. Quantised
ones store linear layers in 8 or 4 bits, the rest in bf16: decoding reads every weight per token.
Whether products run in 8 bits (LLM.int8, fp8 on CUDA) or in bf16 depends on the device; ``means``
says which. Devices define it for the default engine, ``EngineSpec.precisions`` for others.
After loading, ``inspect`` reads the weights' storage and refuses a model in another format.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, Support, Unsupported, require_package
from workloads.devices import DEVICES, device_spec
from workloads.models.products import origin_of
from workloads.registry import ENGINES, engines_for

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workloads.devices.base import Device

#: In report order.
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
#: Aliases that people write in grids.
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


#: What pip installs for other packages than those of the extra "quant".
_INSTALLED_BY = {"neural_compressor": "neural-compressor-pt (Habana's PyTorch image has it)"}


def support(precision: str, device: str, engine: str = "", ability: str | None = None) -> Support:
    """Return a precision's support on a device, with an engine or the default; bad names raise.

    If unsupported, the reason names engines with ``ability`` that support it.
    """
    if precision not in PRECISIONS:
        raise BadConfiguration(f"no precision '{precision}'. There is: {', '.join(PRECISIONS)}.")
    entry, chosen = _declared(precision, device, engine), ENGINES.get(engine)
    if entry.supported or (chosen is not None and ability not in chosen.abilities):
        return entry
    others = [
        spec.name
        for spec in sorted(ENGINES.known(), key=lambda spec: not spec.default)
        if ability in spec.abilities
        and spec.runs_on(device)
        and _declared(precision, device, spec.name).supported
    ]
    if not others:
        return entry
    plural = "s" if len(others) > 1 else ""
    verb = "generate" if ability == "generate" else "work"
    names = " and ".join(filter(None, (", ".join(others[:-1]), others[-1])))
    does = f"the engine{plural} {names} {verb}{'' if plural else 's'} in it there"
    return replace(entry, reason=f"{entry.reason}; {does}")


def _declared(precision: str, device: str, engine: str) -> Support:
    spec = ENGINES.get(engine) if engine else None
    own = spec.precisions.get((precision, device)) if spec is not None else None
    return own or device_spec(device).precision(precision)


def table() -> list[dict[str, Any]]:
    """Return every precision on every device, in report order, for schema and documentation.

    ``text`` is its meaning, or why it is unsupported; ``engine`` is "" for all without their own.
    """
    rows = []
    for precision, device, engine in product(PRECISIONS, DEVICES, ("", *engines_for(None))):
        if engine and (precision, device) not in ENGINES[engine].precisions:
            continue
        cell = support(precision, device, engine, "generate")
        row = {"precision": precision, "device": device, "supported": cell.supported}
        rows.append(row | {"text": cell.means or cell.reason, "engine": engine})
    return rows


def require(precision: str, device: str, engine: str = "") -> Support:
    """Return ``support``; raises Unsupported if there is none or a package is missing here."""
    entry = support(precision, device, engine)
    if not entry.supported:
        raise Unsupported(f"{precision} on {device}: {entry.reason}.")
    for package in entry.packages:
        require_package(package, f"{precision} on {device}", _INSTALLED_BY.get(package, ""))
    return entry


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype of activations and of unquantised weights."""
    import torch

    plain = {"fp32": torch.float32, "fp16": torch.float16}
    return plain.get(precision, torch.bfloat16)


def quantized(precision: str) -> bool:
    """Tell if this precision stores linear layers in 8 or 4 bits."""
    return precision in _STORAGE


def loading_arguments(precision: str, device: str) -> dict[str, Any]:
    """Return arguments for ``from_pretrained``, before ``finish_loading``; see ``require``."""
    entry = require(precision, device)
    # LLM.int8 warns at every cast of bf16 activations.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    # It recommends a package that fetches kernels from a hub during jobs.
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
    """Quantise with torchao in place, where the precision needs it.

    Not through transformers: 4.55's ``TorchAoConfig`` with torchao 0.18 silently leaves bf16.
    """
    if "torchao" not in support(precision, device).packages or quantized_already(model.config):
        return
    from torchao import quantization

    if precision == "int8":
        config = quantization.Int8WeightOnlyConfig()
    elif device_spec(device).can("fp8_products"):
        config = quantization.Float8DynamicActivationFloat8WeightConfig()
    else:
        config = quantization.Float8WeightOnlyConfig()
    layers = hidden_layers(model)
    quantization.quantize_(model, config, lambda module, name: name in layers)


def quantized_already(config: Any) -> bool:
    """Tell if a checkpoint is quantised; it is loaded as it is."""
    return bool(getattr(config, "quantization_config", None))


def align_dtypes(model: Any, dtype: torch.dtype) -> None:
    """Give torchao's weights the ``dtype`` of the activations, in place.

    They remember the dtype of the model that was quantised and multiply with no other, while
    ``from_pretrained`` converts only what is not quantised.
    """
    import torch

    for module in model.modules():
        weight = getattr(module, "weight", None)
        flatten = getattr(weight, "__tensor_flatten__", None)
        if not isinstance(weight, torch.Tensor) or flatten is None or weight.dtype == dtype:
            continue
        aligned: Any = weight.to(dtype)
        if aligned.dtype != dtype:  # fp8 ignores it: its scales stay in float32
            names, facts = flatten()
            parts = {name: getattr(weight, name) for name in names}
            facts = {**facts, "dtype": dtype}
            aligned = type(weight).__tensor_unflatten__(  # type: ignore[attr-defined]
                parts, facts, weight.shape, weight.stride()
            )
        module.weight = torch.nn.Parameter(aligned, requires_grad=False)


def dtype_keyword() -> str:
    """Return the dtype keyword of ``from_pretrained``; 5 warns at every load about 4.55's."""
    import transformers

    return "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"


# Inspect a loaded model's weights as stored: bytes, count, format.
#
# Libraries may skip layers or fall back silently. So storage is read: torchao's subclasses down to
# plain tensors, bitsandbytes' packed weights with their scales.

#: Storage dtype of each quantised format; int4 packs two values per byte.
_STORAGE = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}

#: bitsandbytes' NF4 kernels for CPUs need rows of whole blocks of this many values.
NF4_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """Weights of a loaded model."""

    weight_bytes: int  # stored, with scales; tied weights once
    parameter_count: int  # logical, tied weights once
    quantized_share: float  # quantised / all parameters
    detail: str  # meaning of the precision, for the row


def stored_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors inside a tensor: torchao's parts, or with bitsandbytes' scales."""
    import torch

    if not hasattr(type(tensor), "__tensor_flatten__") and hasattr(
        type(tensor.data), "__tensor_flatten__"
    ):
        tensor = tensor.data  # a Parameter around a subclass
    if hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # sharded tensors name their mesh, too
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
    """Return the bytes of a tensor's data with its scales."""
    return sum(part.numel() * part.element_size() for part in stored_tensors(tensor))


def logical_count(tensor: torch.Tensor) -> int:
    """Return the number of weights in a tensor, however packed."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        return math.prod(map(int, state.shape))
    return int(tensor.numel())


def stored_format(tensor: torch.Tensor) -> str:
    """Return the dtype of the largest plain tensor inside, e.g. ``int8``."""
    largest = max(stored_tensors(tensor), key=lambda part: part.numel() * part.element_size())
    return str(largest.dtype).removeprefix("torch.")


def _in_format(tensor: torch.Tensor, precision: str) -> bool:
    """Tell if a matrix is in a quantised format; torchao's CPU int4 takes a byte per weight."""
    stored = stored_format(tensor)
    if stored == "int8" and getattr(tensor, "target_dtype", None) is not None:
        return precision == str(tensor.target_dtype).removeprefix("torch.")  # type: ignore[attr-defined]
    return stored == _STORAGE.get(precision)


def inspect(model: nn.Module, precision: str, device: str, engine: str = "") -> ModelWeights:
    """Read all weights' storage; raises BadConfiguration if they are not in ``precision``."""
    parameters = dict(model.named_parameters())  # tied ones once
    matrices = {
        name: tensor
        for name, tensor in parameters.items()
        if tensor.dim() >= 2 or getattr(tensor, "quant_state", None) is not None
    }
    packed = _packed_layers(model)
    in_packed = 0
    for name, (weights, *_) in packed.items():
        layer = model.get_submodule(name)
        sizes = [getattr(layer, name, None) for name in ("infeatures", "outfeatures")]
        known = [size for size in sizes if isinstance(size, int)]
        in_packed += math.prod(known) if len(known) == 2 else 8 * weights.numel()  # of int32
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
    """Return layers with 4-bit weights in buffers (GPTQ, AWQ, AutoRound): weights, zeros, scale."""
    layers = {}
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if "qweight" in buffers and not buffers["qweight"].is_floating_point():
            parts = ("qweight", "qzeros", "scales")
            layers[name] = [buffers[part] for part in parts if part in buffers]
    return layers


def card_weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights on this card: all, or its shard."""
    return sum(
        # DeepSpeed's ZeRO 3 empties a parameter and attaches this card's shard.
        stored_bytes(getattr(tensor, "ds_tensor", tensor))
        for tensor in model.parameters()
    )


def check_shapes(model_config: Any, precision: str, device: str) -> None:
    """Refuse NF4 for rows of partial blocks, which fail in the first product (Unsupported)."""
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


def _quantized(matrices: Mapping[str, torch.Tensor], precision: str, packed: Sequence[str]) -> str:
    """Return what is wrong with a plain model: a layer is packed or of another format."""
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
    model: nn.Module, matrices: Mapping[str, torch.Tensor], precision: str, packed: bool
) -> str:
    """Return what is wrong with a quantised model: a linear layer is in another format."""
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


# int8 products by torchao (static quantization): one scale per layer from its input's measured
# range. Ranges are in the saved model's note, since transformers omits them; without: 16 bits.

#: Key in a saved model's note.
RANGES_NOTE = "activation_ranges"

#: Layer name -> (largest absolute input, dimensions of the input).
Ranges = Mapping[str, tuple[float, int]]


def hidden_layers(model: Any, *kinds: type) -> dict[str, Any]:
    """Layers of these kinds, of linear ones where none is given, by name: all but the output."""
    import torch

    output, wanted = model.get_output_embeddings(), kinds or (torch.nn.Linear,)
    modules = model.named_modules()
    return {name: one for name, one in modules if isinstance(one, wanted) and one is not output}


def watch_inputs(
    model: Any,
    layers: Mapping[str, torch.nn.Module],
    texts: Sequence[Sequence[int]],
    device: Device,
    see: Callable[[str, torch.Tensor], None],
) -> None:
    """Run a model on texts and pass every input of these layers to ``see``."""
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
    """Measure the input ranges of each linear layer that the texts reach."""
    import torch

    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    ranges: dict[str, tuple[float, int]] = {}

    def see(name: str, tensor: torch.Tensor) -> None:
        largest = max(float(tensor.abs().max()), ranges.get(name, (0.0, 0))[0])
        ranges[name] = (largest, tensor.dim())

    watch_inputs(model, layers, texts, device, see)
    return ranges


def use_ranges(model: Any, ranges: Ranges) -> int:
    """Make torchao's int8 layers multiply in int8 and count them; raises Unsupported."""
    import torch

    try:
        from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerRow, PerTensor
    except ImportError as error:
        raise Unsupported(
            f"static activations need torchao 0.18: pip install torchao ({error})"
        ) from error
    config = Int8StaticActivationInt8WeightConfig(
        granularity=[PerTensor(), PerRow()], set_inductor_config=False
    )
    count = 0
    for name, (largest, dimensions) in ranges.items():
        weight: Any = getattr(model.get_submodule(name), "weight", None)
        if not hasattr(weight, "act_quant_scale"):
            continue  # stays in 16 bits, like the output layer
        scale = max(largest, torch.finfo(torch.float32).tiny) / 127  # int8's largest
        weight.act_quant_scale = torch.full([1] * dimensions, scale, device=weight.device)
        weight.act_quant_kwargs = config.get_act_quant_kwargs()
        count += 1
    return count


def forget_ranges(model: Any) -> None:
    """Remove ranges, which transformers neither writes nor reads."""
    for parameter in model.parameters():
        if hasattr(parameter, "act_quant_scale"):
            parameter.act_quant_scale = parameter.act_quant_kwargs = None


def restore_ranges(model: Any, directory: Path) -> Any:
    """Apply the ranges in the model's note, if any; return the model."""
    noted = origin_of(directory).get(RANGES_NOTE)
    if isinstance(noted, dict):
        use_ranges(model, {name: (float(most), int(dims)) for name, (most, dims) in noted.items()})
    return model
