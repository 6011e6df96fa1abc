"""The settings that ``batching`` goes together with: pure, since the plan asks."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.engines import find_engine
from workloads.refusal import Asked, Refusal


def batching_refusals(asked: Asked) -> Iterator[Refusal]:
    """Refusals of continuous batching in this job; sorting goes with everything."""
    if asked.parameters.get("batching") != "continuous":
        return
    if asked.parameters.get("profile"):
        yield Refusal(
            setting="profile",
            reason="a profile watches one static batch, which batching continuous never runs",
            hint="write batching: static, or leave profile out",
            unsupported=True,
        )
    hint = "use batching static or sorted"
    if "continuous_batching" not in find_engine(asked.engine).features:
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
