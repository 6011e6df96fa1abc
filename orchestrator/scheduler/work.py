"""Work of a job, and the time that it takes on a nominal device. Pure.

A repeat calls the model so often, for so many positions; a call costs its launch, the reading of
all parameters and its arithmetic (two operations a parameter and position). The figures are no
promise of a device: rows correct them by a factor (``estimator.py``), which within one run spreads
by 1.5 to 2.4 where the work spreads by hundreds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from orchestrator.core.job import Accelerator
from workloads.base import MeasureSettings

#: Parameters of a model about which nothing is known.
USUAL_PARAMETERS = 10**7
#: Positions of a prompt, and most of a training sample, whose lengths no setting says.
USUAL_POSITIONS = 64
#: Steps of training.
USUAL_STEPS = 20
#: Workloads that repeat nothing, since they measure no speed.
ONCE = frozenset(
    {"fp8-calibration", "onnx-calibration", "quality-reference", "quantization", "verification"}
)
#: Batch size of a search.
USUAL_BATCH = 8
#: Fitted to `results/past_runs` and `results/h100`: seconds before the first repeat, and repeats.
FIXED_S, WARMUP_REPEATS, USUAL_REPEATS = 1.3, 2.5, 8
#: The same for training, which makes samples, adapters and an optimizer.
TRAINING_FIXED_S = 3.5


@dataclass(frozen=True, slots=True)
class Device:
    """Nominal speed: seconds to launch a call, parameters read and operations a second."""

    call_s: float
    parameters_per_s: float
    operations_per_s: float


PROCESSOR, CARD = Device(0.015, 2e9, 4.4e10), Device(0.01, 1e12, 3e13)


def repeat_of(
    workload: str, settings: Mapping[str, Any], batch_size: int, cards: int
) -> tuple[float, float]:
    """Calls of the model in one repeat, and positions that a card computes in it."""

    def setting(name: str, usual: int) -> int:
        value = settings.get(name)
        return value if isinstance(value, int) and value > 0 else usual

    if "concurrency" in settings:  # requests of a load, as many at a time as it has users
        requests, tokens = setting("requests", 50), setting("output_tokens", 128)
        users = setting("concurrency", setting("max_sequences", USUAL_BATCH))
        length = setting("input_tokens", USUAL_POSITIONS)
        return ceil(requests / users) * tokens, requests * (tokens + length)
    if "output_tokens" in settings:
        prompts, tokens = setting("prompts", 100), setting("output_tokens", 128)
        positions = prompts * (tokens + setting("input_tokens", USUAL_POSITIONS))
        return ceil(prompts / (batch_size * cards)) * tokens, positions / cards
    if "images" in settings:
        steps, images = setting("steps", 50), setting("images", batch_size)
        pixels = setting("height", 128) * setting("width", 128)
        return ceil(images / (batch_size * cards)) * steps, images * steps * pixels / 64 / cards
    if "texts" in settings:
        texts = setting("texts", 128)
        length = min(setting("max_length", 128), USUAL_POSITIONS)
        return ceil(texts / (batch_size * cards)), texts * length / cards
    if "length" in settings:  # calibration, and the loss before and after
        samples = setting("samples", 32)
        return samples, 3 * samples * setting("length", 256)
    steps = 3 * setting("steps", USUAL_STEPS)  # backward costs two forward passes
    length = min(setting("max_length", 512), 2 * USUAL_POSITIONS)
    return steps, steps * batch_size * setting("gradient_accumulation", 1) * length


def _passes(workload: str, settings: Mapping[str, Any], measure: MeasureSettings) -> float | None:
    """Passes through work that is not repeated, its warm-up included; None: it is repeated."""
    if workload in ONCE or settings.get("images") is not None:
        return 1.0
    if "learning_rate" in settings:
        return 1.0 + measure.warmup / (settings.get("steps") or USUAL_STEPS)
    return None


def nominal_s(
    workload: str,
    accelerator: Accelerator,
    settings: Mapping[str, Any],
    measure: MeasureSettings,
    *,
    batch_size: int | None,
    cards: int = 1,
    parameters: int | None = None,
    emulated: bool = False,
) -> float:
    """Seconds of an attempt without loading, on a nominal device; ``batch_size`` None: searched."""
    size = batch_size or USUAL_BATCH
    calls, positions = repeat_of(workload, settings, size, cards)
    device = PROCESSOR if emulated or accelerator.spec.host else CARD
    count = parameters or USUAL_PARAMETERS
    call_s = device.call_s + count / device.parameters_per_s
    repeat_s = calls * call_s + 2 * count * positions / device.operations_per_s
    passes = _passes(workload, settings, measure)
    if passes is not None:
        fixed_s = TRAINING_FIXED_S if "learning_rate" in settings else FIXED_S
        return fixed_s + min(passes * repeat_s, max(measure.time_limit_s, repeat_s / max(1, calls)))
    repeats = max(measure.min_repeats, min(USUAL_REPEATS, measure.max_repeats))
    # A batch that has begun is finished; a warm-up pass is not cut before its own limit.
    timed_s = min(repeats * repeat_s, max(measure.time_limit_s, repeat_s / max(1.0, calls)))
    warmup_s = min(WARMUP_REPEATS * repeat_s, measure.warmup_limit_s) if measure.warmup else 0.0
    return FIXED_S + warmup_s + max(timed_s, measure.least_s)
