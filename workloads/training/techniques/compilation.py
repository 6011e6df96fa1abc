"""torch.compile."""

from __future__ import annotations

import importlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import BadConfiguration, Unsupported
from workloads.devices.base import torch_compilations
from workloads.settings import choice
from workloads.training.technique import Technique, Training

#: Most batches to rehearse until a new shape needs no new graph.
_REHEARSALS = 8


class Compilation(Technique):
    """torch.compile: the model's Python once, its kernels from then on.

    The forward pass is traced into graphs, whose operations are fused into kernels generated for
    this card, and so is the backward pass. That takes seconds to minutes, once for each shape that
    is met (after the second, sizes that vary are made variables). The layers of a language model
    are alike: compiled one by one, with lengths as variables, they share one graph, whatever lies
    between them stays plain Python, and no new mix of lengths needs a graph of its own. Compiling
    is done before the first step and kept apart (``compile_s``). Inductor's caches are empty when
    it begins, in memory and on disk, so that a row does not depend on the one before. Recipes that
    a Gaudi node keeps on disk stay: what is among them is read, not compiled.
    """

    name: ClassVar[str] = "compilation"
    title: ClassVar[str] = "torch.compile"
    order: ClassVar[int] = 120  # of what the others have made of the model
    beside: ClassVar[Any] = {"compile_scope": ("torch_compile", (True,))}
    capabilities: ClassVar[Any] = {"compile_scope": "dynamic_shapes"}
    whole_weights: ClassVar[Any] = ("torch_compile",)

    torch_compile: bool = choice(
        False,
        always_in_id=True,
        description="Compile the model's forward and backward pass (torch.compile, Inductor; on "
        "Gaudi its own backend). The time that takes is kept apart (compile_s).",
    )

    compile_scope: Literal["model", "layers"] = choice(
        "model",
        description="For torch_compile: the model as a whole, or each of its layers, with lengths "
        "as variables. layers goes together with packed_attention: apart and with logits: learned "
        "or chunked.",
    )

    _compiled: list[Any] = PrivateAttr(default_factory=list)
    _graphs: tuple[int, int] = (0, 0)  # before and after the rehearsals

    def on_model(self, training: Training) -> None:
        if lacking := training.device.cannot_compile():
            raise Unsupported(f"torch.compile: {lacking}")
        import torch

        _from_nothing(training)
        self._graphs = (compiled_graphs(), 0)
        by_layer = self.compile_scope == "layers"
        self._compiled += _layers(training.model) if by_layer else [training.model]
        for module in self._compiled:
            # In place, so that parameter names and classes stay.
            module.compile(
                backend=training.device.compile_backend, dynamic=True if by_layer else None
            )
        training.ending.callback(torch.compiler.reset)

    def before_steps(
        self, training: Training, rehearse: Callable[[int], set[tuple[int, ...]]]
    ) -> None:
        training.enter_phase("compile")
        met: set[tuple[int, ...]] = set()
        compiling: list[float] = []
        usual = 0.0  # seconds of a pass without compiling
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
        self._graphs = (self._graphs[0], compiled_graphs())
        if self._graphs[1] == self._graphs[0]:
            raise BadConfiguration("torch.compile left the model as it is: no graph was compiled")

    def after_steps(self, training: Training) -> None:
        before, rehearsed = self._graphs
        training.details["compiled_graphs"] = str(rehearsed - before)
        training.details["graphs_compiled_in_steps"] = str(compiled_graphs() - rehearsed)
        for module in self._compiled:
            module._compiled_call_impl = None  # evaluation needs no compiled graphs


def _layers(model: Any) -> list[Any]:
    """A model's layers, by the class names that it declares."""
    named = (getattr(module, "_no_split_modules", None) or () for module in model.modules())
    names = {*itertools.chain.from_iterable(named)}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise Unsupported(
            f"compile_scope layers: {type(model).__name__} does not say what its layers are; "
            "write compile_scope: model"
        )
    return layers


def compiles_whole(parameters: Mapping[str, Any]) -> bool:
    """Tell if a job with these parameters compiles its model as a whole."""
    return bool(parameters.get("torch_compile")) and parameters.get("compile_scope") != "layers"


def compiled_graphs() -> int:
    """Number of graphs that this process has compiled so far."""
    return torch_compilations().graphs or 0


def _from_nothing(training: Training) -> None:
    """Start with empty Inductor caches, on disk and in memory, while the job runs."""
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


SPECS = (Compilation,)
