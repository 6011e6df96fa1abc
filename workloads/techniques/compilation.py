"""torch.compile: the model's Python once, its kernels from then on.

The forward pass is traced into graphs, whose operations are fused into kernels generated for this
card, and so is the backward pass. That takes seconds to minutes, once for each shape that is met
(after the second, sizes that vary are made variables). Compiling is done before the first step and
kept apart (``compile_s``). Inductor's caches are empty when it begins, in memory and on disk, so
that a row does not depend on the one before. Recipes that a Gaudi node keeps on disk stay: what is
among them is read, not compiled.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from pydantic import PrivateAttr

from workloads.compilations import of_torch
from workloads.errors import BadConfiguration, Unsupported
from workloads.parallel.layout import divides_weights
from workloads.refusal import Asked, Refusal
from workloads.settings import setting
from workloads.techniques.base import Technique, Training

#: Most batches that are tried until one of a new shape needs no new graph.
_REHEARSALS = 8


class Compilation(Technique):
    """Compilation of the model."""

    name: ClassVar[str] = "compilation"
    title: ClassVar[str] = "torch.compile"
    order: ClassVar[int] = 120  # of what the others have made of the model

    torch_compile: bool = setting(
        False,
        role="choice",
        always_in_id=True,
        description="Compile the model's forward and backward pass (torch.compile, Inductor; on "
        "Gaudi its own backend). The time that takes is kept apart (compile_s).",
    )

    _graphs: list[int] = PrivateAttr(default_factory=list)  # before, after the rehearsals

    def refusals(self, asked: Asked) -> Iterable[Refusal]:
        if not self.torch_compile:
            return
        strategy = asked.parameters.get("strategy") or "ddp"
        driven = strategy.startswith("zero")
        if asked.cards > 1 and (driven or divides_weights(asked.parameters, asked.cards)):
            yield Refusal(
                setting="torch_compile",
                reason="this version compiles no model that "
                + ("DeepSpeed drives" if driven else "is split over cards"),
                hint="write strategy: ddp",
                unsupported=True,
            )

    def on_model(self, training: Training) -> None:
        if not self.torch_compile:
            return
        lacking = training.device.cannot_compile()
        if lacking:
            raise Unsupported(f"torch.compile: {lacking}")
        import torch

        _from_nothing(training)
        self._graphs.append(compiled_graphs())
        # In place: names of parameters, and the class that adapters know, stay as they are.
        training.model.compile(backend=training.device.compile_backend)
        training.ending.callback(torch.compiler.reset)

    def before_steps(
        self, training: Training, rehearse: Callable[[int], set[tuple[int, ...]]]
    ) -> None:
        if not self.torch_compile:
            return
        training.enter_phase("compile")
        met: set[tuple[int, ...]] = set()
        compiling: list[float] = []
        usual = 0.0  # what a pass takes when there is nothing to compile
        for step in range(_REHEARSALS):
            known, began = compiled_graphs(), time.perf_counter()
            shapes = rehearse(step)
            took = time.perf_counter() - began
            if compiled_graphs() > known:
                compiling.append(took)
            else:
                usual = took
                if not shapes <= met:
                    break  # sizes are variables by now
            met |= shapes
        training.compile_s += max(sum(compiling) - len(compiling) * usual, 0.0)
        self._graphs.append(compiled_graphs())
        if self._graphs[1] == self._graphs[0]:
            raise BadConfiguration("torch.compile left the model as it is: no graph was compiled")

    def after_steps(self, training: Training) -> None:
        if not self.torch_compile:
            return
        before, rehearsed = self._graphs
        training.details["compiled_graphs"] = str(rehearsed - before)
        training.details["graphs_compiled_in_steps"] = str(compiled_graphs() - rehearsed)
        training.model._compiled_call_impl = None  # a look at the losses needs no graphs of its own


def compiled_graphs() -> int:
    """Number of graphs that this process has compiled so far."""
    return of_torch().graphs or 0


def _from_nothing(training: Training) -> None:
    """Forget what Inductor compiled before, on disk and in this process, while the job runs."""
    import torch

    torch.compiler.reset()
    directory = training.ending.enter_context(tempfile.TemporaryDirectory(prefix="compiled-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory  # restored after the job
    utilities: Any = importlib.import_module("torch._inductor.utils")
    for name in ("clear_caches", "clear_inductor_caches"):  # by version
        getattr(utilities, name, lambda: None)()
    config: Any = importlib.import_module("torch._inductor.config")
    # No more processes than the job has cores.
    threads = min(torch.get_num_threads(), config.compile_threads or 1)
    training.ending.enter_context(config.patch(compile_threads=threads))


SPEC = Compilation
