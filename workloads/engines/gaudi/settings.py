"""Settings of engines that run on Gaudi cards."""

from __future__ import annotations

from typing import Literal

from workloads.settings import Settings, setting


class GaudiSettings(Settings):
    """Settings of a Gaudi card's execution."""

    hpu_mode: Literal["lazy", "compile", "eager"] | None = setting(
        None,
        role="choice",
        loads=True,
        description="How a Gaudi card executes: lazy collects operations into graphs, which are "
        "captured and replayed; compile hands torch.compile's graphs to the card (transformers: "
        "with a static cache and prompts padded to multiples of 128); eager runs one "
        "operation after the other. Left out: lazy with optimum-habana, compile with "
        "vllm-gaudi, eager with others; where the grid names no engine either, the plan "
        "chooses (docs/gaudi.md).",
    )


class GaudiImageSettings(GaudiSettings):
    """Settings of optimum-habana's diffusion pipelines."""

    hpu_graphs: bool = setting(
        True,
        role="choice",
        loads=True,
        description="Capture the denoiser once for each shape and replay it (HPU graphs), in lazy "
        "mode; without, every step is collected anew.",
    )
