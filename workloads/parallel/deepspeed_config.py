"""DeepSpeed's configuration, generated from a job: a pure function, its result kept in the row.

Nothing is left to ``auto`` or to a file, so that a row says with what it was measured. The
optimizer is torch's AdamW everywhere: DeepSpeed's own kernels are compiled where they are first
used, which needs a compiler on every node and would be timed with the job.

On Gaudi (HabanaAI's fork) gradients are neither kept contiguous nor exchanged while they are
computed, ZeRO 2 sums them instead of scattering, and ZeRO 3 gathers weights when a model is saved.
Gradients are clipped where a job says so, as by any strategy; Habana's examples clip to 1.
"""

from __future__ import annotations

from typing import Any

from workloads.devices import device_spec

#: Most gradients (elements) that are exchanged at once: DeepSpeed's default, for which it allocates
#: 2 GB in fp32 however small a model is.
BUCKET = 500_000_000

#: Parameters that are smaller than this (elements) stay whole on every card in ZeRO 3; DeepSpeed's
#: default would keep all of a small model.
PERSISTENCE_THRESHOLD = 1000


def deepspeed_config(
    *,
    stage: int,
    device: str,
    precision: str,
    batch_size: int,
    micro_batches: int,
    data_size: int,
    trained: int,
    learning_rate: float,
    max_gradient_norm: float | None = None,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> dict[str, Any]:
    """The configuration of one job.

    Args:
        stage: of ZeRO, 0 to 3.
        device: by its name; what DeepSpeed can do there differs.
        precision: of the job; bf16 keeps a master copy of what is trained in fp32.
        batch_size: samples of one card in one optimizer step.
        micro_batches: passes in which a card works them off.
        data_size: cards that share a batch.
        trained: number of parameters that learn; no bucket is larger.
        learning_rate: of AdamW, without weight decay.
        max_gradient_norm: to which gradients are clipped; None: they are not.
        offload_optimizer: keep optimizer state, and update, on the host.
        offload_parameters: keep weights on the host between uses.
    """
    spec = device_spec(device)
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": spec.can("contiguous_gradients"),
        "overlap_comm": spec.can("overlapped_exchange") and stage > 1,
    }
    if stage:
        zero["reduce_bucket_size"] = min(BUCKET, trained)
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
        "train_batch_size": batch_size * data_size,
        "train_micro_batch_size_per_gpu": batch_size // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": max_gradient_norm or 0.0,
        "steps_per_print": 1_000_000_000,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": learning_rate, "weight_decay": 0.0, "torch_adam": True},
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
