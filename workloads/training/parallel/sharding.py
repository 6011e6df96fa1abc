"""Weights and optimizer in parts: ZeRO by DeepSpeed, FSDP2 by PyTorch (``fully_shard``).

DeepSpeed's configuration is generated from the job. The optimizer is torch's AdamW: DeepSpeed's
kernels would need a compiler on every node and be compiled in timed steps. On Gaudi (HabanaAI's
fork) gradients are neither contiguous nor overlapped, and ZeRO 2 sums instead of scattering. It
silently trains alone if it misjudges the gang, so the world size is checked.

With FSDP2, as with ZeRO 3, each layer is gathered for its forward and backward pass, so a card
holds its shards and about two layers; gradients are reduce-scattered per layer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from workloads.base import BadConfiguration, Unsupported, require_package
from workloads.training.methods import ADAPTER_METHODS
from workloads.training.parallel.exchange import Stamped, require
from workloads.training.parallel.layout import Groups
from workloads.training.technique import Training

#: Elements of an exchange: DeepSpeed's default, which allocates 2 GB in fp32 for any model.
BUCKET = 500_000_000

#: Elements below which ZeRO 3 keeps parameters whole; the default would keep all of a small model.
PERSISTENCE_THRESHOLD = 1000


def deepspeed_config(
    training: Training,
    stage: int,
    *,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> dict[str, Any]:
    """Configuration of a job with ZeRO stage 0 to 3; bf16 has an fp32 master copy."""
    spec = training.device.spec
    trained = sum(parameter.numel() for parameter in training.trainable())
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": spec.can("contiguous_gradients"),
        "overlap_comm": spec.can("overlapped_exchange") and stage > 1,
    }
    if stage:
        zero["reduce_bucket_size"] = min(BUCKET, trained)  # no larger than what learns
    if stage in (1, 2):
        zero["allgather_bucket_size"] = min(BUCKET, trained)
    if stage == 2:
        zero["reduce_scatter"] = spec.can("reduce_scatter")
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        zero["stage3_param_persistence_threshold"] = PERSISTENCE_THRESHOLD
    on_host = {"device": "cpu", "pin_memory": spec.can("pinned_offload")}
    if offload_optimizer:
        zero["offload_optimizer"] = on_host
    if offload_parameters:
        zero["offload_param"] = on_host
    return {
        "train_batch_size": training.batch_size * training.layout.data_size,
        "train_micro_batch_size_per_gpu": training.batch_size // training.micro_batches,
        "gradient_accumulation_steps": training.micro_batches,
        "gradient_clipping": training.max_gradient_norm or 0.0,
        "steps_per_print": 1_000_000_000,
        "bf16": {"enabled": training.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": training.learning_rate, "weight_decay": 0.0, "torch_adam": True},
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def announce_deepspeed(device: str) -> None:
    """Set DeepSpeed's accelerator before its import (undone after the job)."""
    install = "deepspeed (on Gaudi: HabanaAI's fork)"
    require_package("deepspeed", "a strategy of zero0 to zero3", install)
    os.environ["DS_ACCELERATOR"] = device
    # Index among the cards that this process sees: one.
    os.environ["LOCAL_RANK"] = "0"


#: DeepSpeed's choice of torch's algorithms in this process, once it is imported.
chosen_algorithms: list[bool] = []


def use_its_algorithms() -> bool:
    """Apply DeepSpeed's choice of torch's algorithms; True if deterministic, as on Gaudi.

    DeepSpeed sets it at import only, and workers restore torch's setting after each job.
    """
    if not chosen_algorithms:
        importlib.import_module("deepspeed").accelerator.get_accelerator()
        chosen_algorithms.append(torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(chosen_algorithms[0])
    return chosen_algorithms[0]


def start_deepspeed(training: Training, groups: Groups, stage: int, **offload: bool) -> None:
    """Hand model and optimizer over to DeepSpeed; check that it sees the whole gang."""
    config = deepspeed_config(training, stage, **offload)
    layout, ranks = training.layout, SimpleNamespace()  # groups under Megatron's names
    for name, rank, size, group in (
        ("model", layout.tensor_rank, layout.tensor, groups.tensor),
        ("data", layout.data_rank, layout.data_size, groups.data),
    ):
        for what, answer in (("rank", rank), ("world_size", size), ("group", group)):
            setattr(ranks, f"get_{name}_parallel_{what}", lambda answer=answer: answer)
    deterministic = use_its_algorithms()
    deepspeed = importlib.import_module("deepspeed")
    with contextlib.suppress(AttributeError, KeyError):
        # Shared memory between CPU processes would be compiled; gloo does as well.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=training.device.collective_backend,
        auto_mpi_discovery=False,
        verbose=False,
        dist_init_required=False,
    )
    engine, optimizer, _, _ = deepspeed.initialize(
        model=training.model,
        model_parameters=training.trainable(),
        config=config,
        mpu=ranks if layout.tensor > 1 else None,
        dist_init_required=False,
    )
    registry = importlib.import_module("deepspeed.utils.groups")
    training.ending.callback(setattr, registry, "mpu", None)  # else the next job would have it too
    if int(engine.world_size) != training.cards:
        raise BadConfiguration(
            f"DeepSpeed sees {engine.world_size} processes where there are {training.cards}"
        )
    if int(engine.zero_optimization_stage()) != stage:
        raise BadConfiguration(
            f"DeepSpeed runs ZeRO {engine.zero_optimization_stage()} instead of {stage}"
        )
    training.wrapper, training.optimizer = engine, optimizer
    for averages in optimizer.state.values():
        # ZeRO 0 in bf16 made them by a step without gradients, which is not one of the job's.
        if isinstance(step := averages.get("step"), torch.Tensor):
            step.zero_()
    training.divided = engine
    exchange = Stamped(training.device)
    training.ending.enter_context(
        exchange.watch(importlib.import_module("deepspeed.comm.comm").cdb)
    )
    training.exchanges.append(exchange)
    # Losses are divided by the tokens of the whole step already.
    training.backward = lambda loss: engine.backward(loss, scale_wrt_gas=False)
    training.update = engine.step

    @contextlib.contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        yield
        if not last:
            engine.step()  # counts; the update comes with the last one

    training.around_micro_batch.append(micro_batch)
    if stage == 3:
        adapter = training.method in ADAPTER_METHODS  # over weights that nobody saves
        parameters = training.trainable() if adapter else [*training.model.parameters()]
        training.gathered = lambda: deepspeed.zero.GatheredParameters(parameters)
    training.details |= {
        "deepspeed_config": json.dumps(config, sort_keys=True),
        "deterministic_algorithms": str(deterministic).lower(),
        "deepspeed": str(deepspeed.__version__),
    }


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
    if stamped:  # else stamps would count what computing hides
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        exchange = Stamped(training.device)

        def timed(kind: Any) -> Any:
            class Timed(kind):  # type: ignore[misc]
                def __call__(self, *args: Any, **kwargs: Any) -> Any:
                    with exchange.timed():
                        return super().__call__(*args, **kwargs)

            return Timed()

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(timed(collectives.DefaultAllGather))
                module.set_custom_reduce_scatter(timed(collectives.DefaultReduceScatter))
        training.exchanges.append(exchange)

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
