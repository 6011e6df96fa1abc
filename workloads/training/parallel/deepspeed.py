"""DeepSpeed by a configuration that is generated from the job, without ``auto`` or files.

The optimizer is torch's AdamW: DeepSpeed's kernels would need a compiler on every node and be
compiled in timed steps. On Gaudi (HabanaAI's fork) gradients are neither contiguous nor overlapped,
and ZeRO 2 sums instead of scattering. DeepSpeed silently trains alone if it misjudges the gang, so
the world size is checked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, Unsupported
from workloads.data.cache import flush_tree
from workloads.training.parallel.exchange import Stamped
from workloads.training.parallel.layout import Groups, Layout
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


def announce(device: str) -> None:
    """Set DeepSpeed's accelerator before its import (undone after the job)."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Unsupported(
            "strategies zero0 to zero3 need the package 'deepspeed', which is not installed here; "
            "install it with: pip install 'nightgrid[deepspeed]' (on Gaudi: HabanaAI's fork)"
        )
    os.environ["DS_ACCELERATOR"] = device
    # Index among the cards that this process sees: one.
    os.environ["LOCAL_RANK"] = "0"


#: DeepSpeed's choice of torch's algorithms in this process, once it is imported.
chosen_algorithms: list[bool] = []


def use_its_algorithms() -> bool:
    """Apply DeepSpeed's choice of torch's algorithms; True if deterministic, as on Gaudi.

    DeepSpeed sets it at import only, and workers restore torch's setting after each job.
    """
    import torch

    if not chosen_algorithms:
        importlib.import_module("deepspeed").accelerator.get_accelerator()
        chosen_algorithms.append(torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(chosen_algorithms[0])
    return chosen_algorithms[0]


class _Ranks:
    """Groups of ranks under Megatron's names, as DeepSpeed expects."""

    def __init__(self, layout: Layout, groups: Groups) -> None:
        for name, rank, size, group in (
            ("model", layout.tensor_rank, layout.tensor, groups.tensor),
            ("data", layout.data_rank, layout.data_size, groups.data),
        ):
            answers = {"rank": rank, "world_size": size, "group": group}
            for what, answer in answers.items():
                setattr(self, f"get_{name}_parallel_{what}", lambda answer=answer: answer)


class Divided:
    """The parts of a training that DeepSpeed has divided among the ranks."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def save(self, directory: Path) -> None:
        """Write every rank's part; all ranks call this together."""
        self._engine.save_checkpoint(str(directory.parent), tag=directory.name, save_latest=False)
        flush_tree(directory)

    def load(self, directory: Path) -> None:
        """Read every rank's part back; all ranks call this together."""
        path, _ = self._engine.load_checkpoint(str(directory.parent), tag=directory.name)
        if path is None:
            raise BadConfiguration(f"DeepSpeed reads no checkpoint in {directory}")


def start(training: Training, groups: Groups, stage: int, **offload: bool) -> None:
    """Hand model and optimizer over to DeepSpeed; check that it sees the whole gang."""
    config = deepspeed_config(training, stage, **offload)
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
        mpu=_Ranks(training.layout, groups) if training.layout.tensor > 1 else None,
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
    training.divided = Divided(engine)
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
        parameters = training.trainable()
        training.gathered = lambda: deepspeed.zero.GatheredParameters(parameters)
    training.details |= {
        "deepspeed_config": json.dumps(config, sort_keys=True),
        "deterministic_algorithms": str(deterministic).lower(),
        "deepspeed": str(deepspeed.__version__),
    }
