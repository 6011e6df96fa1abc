"""FSDP2 (``fully_shard``): weights sharded over cards, as in ZeRO 3.

Each layer is gathered for its forward and backward pass, so a card holds its shards and about two
layers; gradients are reduce-scattered per layer.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from workloads.base import Unsupported
from workloads.training.parallel.exchange import Stamped, require
from workloads.training.technique import Training

_NEEDED = "torch.distributed.fsdp:FSDPModule", "torch.distributed.fsdp:fully_shard"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_NEEDED_FOR_STAMPS = (
    f"{_COLLECTIVES}:DefaultAllGather",
    f"{_COLLECTIVES}:DefaultReduceScatter",
    "torch.distributed.fsdp:FSDPModule.set_custom_all_gather",
    "torch.distributed.fsdp:FSDPModule.set_custom_reduce_scatter",
)


def shard(training: Training) -> None:
    """Divide a model that is whole on every card, in place."""
    stamped = not training.device.spec.can("overlapped_exchange")
    require("fsdp2", *_NEEDED, *(_NEEDED_FOR_STAMPS if stamped else ()))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model: Any = training.model
    mesh = init_device_mesh(training.device.spec.torch_type, (training.cards,))
    layers = _layers(training)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if stamped:
        exchange = Stamped(training.device)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _stamp(module, exchange)
        training.exchanges.append(exchange)  # else stamps would count what computing hides

    @contextlib.contextmanager
    def exchanged(whether: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(whether)
        yield

    training.around_micro_batch.append(exchanged)
    # Else a rehearsal's zero gradients stay, unsharded.
    training.around_rehearsal.append(lambda: exchanged(True))
    training.gathered = lambda: _gathered(model)
    training.details["fsdp2"] = f"{len(layers)} layers and the rest over {training.cards} cards"


def _layers(training: Training) -> list[nn.Module]:
    """A model's layers: the modules that transformers does not split."""
    model, inner = training.model, training.base_model
    kinds = set(getattr(inner, "_no_split_modules", None) or ())
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    layers = [
        module
        for module in model.modules()
        if type(module).__name__ in kinds
        and all(owners[id(parameter)] == 1 for parameter in module.parameters())  # none is tied
    ]
    if not layers:
        raise Unsupported(
            f"strategy fsdp2: transformers does not name the layers of {type(inner).__name__}"
        )
    return layers


def _stamp(module: Any, exchange: Stamped) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def timed(kind: Any) -> Any:
        class Timed(kind):  # type: ignore[misc]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                with exchange.timed():
                    return super().__call__(*args, **kwargs)

        return Timed()

    module.set_custom_all_gather(timed(collectives.DefaultAllGather))
    module.set_custom_reduce_scatter(timed(collectives.DefaultReduceScatter))


@contextlib.contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    """Replace shards by whole weights, for saving; all ranks together."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the last pass left some gathered, for a backward pass
    parts: list[tuple[nn.Module, str, Any]] = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    whole: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module, name, part in parts:
        if id(part) not in whole:
            whole[id(part)] = nn.Parameter(part.full_tensor().detach(), part.requires_grad)
        module._parameters[name] = whole[id(part)]
    try:
        yield
    finally:
        for module, name, part in parts:
            module._parameters[name] = part
