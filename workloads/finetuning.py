"""Fine-tuning: how many samples a second a model learns from, by method and technique.

A step takes a batch forward, its gradients backward, and lets the optimizer change what is trained;
that is about three times the arithmetic of the forward pass alone, and memory for weights,
gradients, the optimizer's averages and every layer's activations. Cards are short of the latter, so
methods train less (adapters), store less (4 bits), and techniques trade arithmetic for memory.

An engine trains: Nightgrid's own loop (``training/loop.py``), or a library's trainer. Every
optimizer step is one timed sample of the row, whichever it is.
"""

from __future__ import annotations

from dataclasses import replace

from workloads.base import (
    BadConfiguration,
    JobContext,
    JobDescription,
    Request,
    Result,
    Workload,
    require,
)
from workloads.engines import engine_function
from workloads.registry import find_workload
from workloads.rules import refusals


def run(request: Request, context: JobContext) -> Result:
    """Measure fine-tuning; see ``workloads.base.Workload``."""
    spec = find_workload(request.workload)
    parameters = spec.parameters.model_validate(dict(request.parameters)).model_dump()
    if request.batch_size < 1:
        raise BadConfiguration(f"batch size {request.batch_size}; at least 1 is needed")
    asked = JobDescription(
        model=request.model,
        dataset=request.dataset,
        precision=request.precision,
        device=context.device.name,
        batch_size=request.batch_size,
        cards=context.world_size,
        parameters={**parameters, **request.settings},
        engine=request.engine,
    )
    require(refusals(spec, asked))
    train: Workload = engine_function(request.engine, "train", context.device.name)
    return train(replace(request, parameters=parameters), context)
