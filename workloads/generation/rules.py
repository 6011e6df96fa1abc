"""The settings that ``batching`` goes together with: pure, since the plan asks."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.base import JobDescription, Refusal
from workloads.devices import device_spec
from workloads.engines import ENGINES, find_engine


def batching_refusals(asked: JobDescription) -> Iterator[Refusal]:
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
        reason = f"the engine {asked.engine} does not do continuous batching"
        hint = _engines_hint(asked) or hint
    elif not (device := device_spec(asked.device)).can("dynamic_shapes"):
        reason = (
            f"rows that come and go change shapes at every step, which {device.title} compiles anew"
        )
    else:
        return
    yield Refusal(setting="batching", reason=reason, hint=hint, unsupported=True)


def _engines_hint(asked: JobDescription) -> str:
    """The engines that batch continuously on this device; empty where there is none."""
    names = [
        spec.name
        for spec in ENGINES.known()
        if "continuous_batching" in spec.features and spec.runs_on(asked.device)
    ]
    return (
        f"write engine: {' or '.join(names)}"
        if names and device_spec(asked.device).can("dynamic_shapes")
        else ""
    )
