"""Products in int8: torchao multiplies int8 weights by activations in int8 (static quantization).

The range of each layer's input is measured on texts once, and one scale a layer follows from it.
The ranges lie in the note beside a saved model, since transformers reads weights of torchao without
them; whoever does not know them multiplies the same weights in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import Unsupported
from workloads.models.products import origin_of

if TYPE_CHECKING:
    import torch

    from workloads.devices.base import Device

#: Their entry in the note of a saved model.
NOTED = "activation_ranges"

#: A layer's largest absolute input, and the dimensions that its inputs have, by its name.
Ranges = Mapping[str, tuple[float, int]]

_LARGEST_INT8 = 127


def watch(
    model: Any,
    layers: Mapping[str, torch.nn.Module],
    texts: Sequence[Sequence[int]],
    device: Device,
    see: Callable[[str, torch.Tensor], None],
) -> None:
    """Let a model read texts, and show ``see`` every input of these layers."""
    import torch

    def showing(name: str) -> Any:
        return lambda _, given: see(name, given[0].detach())

    hooks = [layer.register_forward_pre_hook(showing(name)) for name, layer in layers.items()]
    try:
        for ids in texts:
            with torch.no_grad():
                model(input_ids=torch.tensor([ids], device=device.torch_device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def measure_ranges(model: Any, texts: Sequence[Sequence[int]], device: Device) -> Ranges:
    """Ranges of the inputs of each linear layer that the texts reach."""
    import torch

    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    found: dict[str, tuple[float, int]] = {}

    def see(name: str, given: torch.Tensor) -> None:
        largest = max(float(given.abs().max()), found.get(name, (0.0, 0))[0])
        found[name] = (largest, given.dim())

    watch(model, layers, texts, device, see)
    return found


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
        scale = max(largest, torch.finfo(torch.float32).tiny) / _LARGEST_INT8
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
    """The model, with the ranges that were kept beside it; as it is where there are none."""
    noted = origin_of(directory).get(NOTED)
    if isinstance(noted, dict):
        use_ranges(model, {name: (float(most), int(dims)) for name, (most, dims) in noted.items()})
    return model
