"""A workload that is small but real: it loads a matrix, multiplies it, reports samples; and it can
be asked for every kind of trouble. Tests register it under the name ``tiny``."""

from __future__ import annotations

import os
import random
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from workloads import base, registry
from workloads.base import JobContext, Request, Result, Sample
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters, setting

if TYPE_CHECKING:
    import pytest

Trouble = Literal["", "oom", "python-oom", "unsupported", "missing", "exit", "secret", "untidy"]


class TinyParameters(WorkloadParameters):
    """``size`` is the matrix's; ``trouble`` what goes wrong."""

    size: int = setting(64, role="work", description="Rows and columns of the matrix.")
    trouble: Trouble = setting("", role="work", description="What goes wrong.")


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = WorkloadSpec(
        name="tiny",
        function="tiny_workload:run",
        parameters=TinyParameters,
        summary="a matrix product",
    )
    entries = MappingProxyType({**registry.WORKLOADS, "tiny": entry})
    monkeypatch.setattr(registry, "WORKLOADS", entries)
    registry.declared_in_rows.cache_clear()  # of jobs that were made without it


class Config:
    """A generation config as the worker sees it: something on a model that jobs may change."""

    def __init__(self) -> None:
        self.max_length = 20


class Loaded:
    """A "model": a matrix, and a generation config."""

    def __init__(self, size: int) -> None:
        import torch

        self.matrix = torch.rand(size, size, dtype=torch.float32)
        self.generation_config = Config()


def run(request: Request, context: JobContext) -> Result:
    """Multiply ``batch_size`` vectors by the matrix, three times."""
    import torch

    size: int = request.parameters["size"]
    context.enter_phase("load")
    began = context.clock()
    model: Loaded = context.resident(request.residency_key, lambda: Loaded(size))
    load_s = context.clock() - began
    _get_into(request.parameters["trouble"], model)
    context.enter_phase("measure")
    samples = []
    for repeat in range(request.measure.min_repeats):
        began = context.clock()
        product = torch.rand(request.batch_size, size, dtype=torch.float32) @ model.matrix
        samples.append(
            Sample(
                repeat=repeat,
                batch=0,
                warmup=False,
                complete=True,
                wall_s=context.clock() - began,
                cpu_s=0.0,
                items=request.batch_size,
                input_tokens=size,
                output_tokens=size,
                computed_tokens=size,
                loss=float(product.sum()),
            )
        )
    first_weight = float(model.matrix[0, 0])
    return Result(
        samples=tuple(samples),
        stop_reason="max_repeats",
        load_s=load_s,
        details={
            "random": str(random.random()),
            "torch_random": str(float(torch.rand(1))),
            "first_weight": str(first_weight),
            "dtype": str(torch.get_default_dtype()),
            "grad": str(torch.is_grad_enabled()),
            "threads": str(torch.get_num_threads()),
            "max_length": str(model.generation_config.max_length),
            "leak": os.environ.get("TINY_LEAK", ""),
            "ranks": str(context.collective.gather(context.rank)),
        },
    )


def _get_into(trouble: Trouble, model: Loaded) -> None:
    """Go wrong as asked."""
    import torch

    if trouble == "oom":
        kept = []
        while True:
            kept.append(torch.ones(1_000_000))
    if trouble == "python-oom":
        raise MemoryError
    if trouble == "unsupported":
        raise base.Unsupported("no such precision here")
    if trouble == "missing":
        raise base.DataMissing("no dataset 'nix'")
    if trouble == "exit":
        sys.exit(3)
    if trouble == "secret":
        raise RuntimeError(f"401 for {os.environ['HF_TOKEN']}")
    if trouble == "untidy":
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        os.environ["TINY_LEAK"] = "yes"
        model.generation_config.max_length = 99
