"""What ``batching`` and ``packed_weights`` go together with: pure, since the plan asks."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.refusal import Asked, Refusal

#: Precisions whose matrices lie in memory as torch's linear layers have them.
PACKABLE = ("fp32", "bf16", "fp16")


def batching_refusals(asked: Asked) -> Iterator[Refusal]:
    """Refusals of continuous batching in this job; sorting goes with everything."""
    yield from _packing_refusals(asked)
    if asked.parameters.get("batching") != "continuous":
        return
    hint = "use batching static or sorted"
    if asked.engine != "transformers":
        reason = f"the engine {asked.engine} batches in its own way"
    elif not asked.on.can("dynamic_shapes"):
        reason = (
            f"rows that come and go change shapes at every step, which {asked.on.title} compiles "
            "anew"
        )
    elif asked.parameters.get("attention", "sdpa") != "sdpa":
        reason = f"attention {asked.parameters['attention']} knows no rows of unlike length"
    elif (asked.parameters.get("tensor_parallel") or 1) > 1:
        reason = "cards that split a model would have to admit prompts alike, which is not built"
    else:
        return
    yield Refusal(setting="batching", reason=reason, hint=hint, unsupported=True)


def _packing_refusals(asked: Asked) -> Iterator[Refusal]:
    if not asked.parameters.get("packed_weights"):
        return
    if not asked.on.can("packed_linear"):
        reason = f"oneDNN's layout is one of CPUs, not of {asked.device}"
    elif asked.engine != "transformers":
        reason = f"the engine {asked.engine} lays out its weights itself"
    elif asked.precision not in PACKABLE:
        reason = f"packed are matrices in {', '.join(PACKABLE)}, not {asked.precision}"
    elif asked.parameters.get("adapter") or (asked.parameters.get("tensor_parallel") or 1) > 1:
        reason = "adapters and tensor parallelism need the plain matrices"
    else:
        return
    yield Refusal(setting="packed_weights", reason=reason, unsupported=True)
