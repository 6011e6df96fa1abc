"""The remains of a training: a verdict on its losses, and the weights that are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from workloads.base import JobContext, Request, Sample
from workloads.finetuning_method import MethodParameters
from workloads.models.loading import ModelSource
from workloads.models.saved import origin_by, save_trained
from workloads.techniques.base import Training
from workloads.training import adapters, methods
from workloads.training.step import Steps


def losses(
    samples: Sequence[Sample],
    first_loss: float,
    gather: Callable[[Any], list[Any]],
    my_loss_after: float,
) -> tuple[dict[str, float], dict[str, str]]:
    """The loss on the first batch before and after training, and what is wrong with losses.

    Each rank has its part of that batch; the mean of their losses is that of the whole batch.
    """
    pairs = gather((first_loss, my_loss_after))
    before, after = (math.fsum(values) / len(pairs) for values in zip(*pairs, strict=True))
    found = {"first_batch_loss_before": before, "first_batch_loss_after": after}
    strange = [s.repeat for s in samples if s.loss is None or not math.isfinite(s.loss)]
    if strange:
        first = "before anything was learned" if strange[0] == 0 else f"first at step {strange[0]}"
        text = f"the loss is no number in {len(strange)} of {len(samples)} steps, {first}"
        return found, {"loss_flag": text}
    if not after < before:
        text = f"the loss on the first batch did not fall: {before:.6g} before, {after:.6g} after"
        return found, {"loss_flag": text}
    return found, {}


def finish(
    request: Request,
    context: JobContext,
    method: MethodParameters,
    training: Training,
    source: ModelSource,
    steps: Steps,
    make: Any,
) -> tuple[dict[str, str], dict[str, float]]:
    """Keep what remains of the trained model: an adapter or the whole model under its name, or
    converted weights and the loss that they have."""
    details: dict[str, str] = {}
    metrics: dict[str, float] = {}
    origin = {
        **origin_by(request),
        "method": method.method,
        "precision": request.precision,
        "dataset": request.dataset,
        "steps": method.steps,
        **training.origin,
    }
    if method.save_adapter:
        with training.gathered():
            if context.rank == 0:
                where = adapters.save_adapter(training.model, method.save_adapter, origin)
                details["saved_adapter"] = str(where)
        context.collective.barrier()  # ranks end together, and with them the gang
    if method.save_model:
        with training.gathered():
            if context.rank == 0:
                where = save_trained(training.model, source, method.save_model, origin)
                details["saved_model"] = str(where)
        context.collective.barrier()
    if method.method.startswith("qat"):
        training.wrapper = None
        training.model, details["converted"] = methods.converted(training.model)
        metrics["converted_loss"] = steps.evaluate(make(0))
    return details, metrics
