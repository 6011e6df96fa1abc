"""Techniques of computation: compilation, attention, kernels, and the last layer."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import (
    BadConfiguration,
    JobDescription,
    Refusal,
    Unsupported,
    require_package,
)
from workloads.devices.base import torch_compilations
from workloads.models.attention import make_ready, refusals
from workloads.settings import choice, choice_in_id
from workloads.training.technique import Loading, Technique, Training
from workloads.training.techniques.batches import compiles_whole, one_shape

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

    torch_compile: bool = choice_in_id(
        False,
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

        torch.compiler.reset()
        # Empty caches on disk and in memory, while the job runs.
        cache = importlib.import_module("torch._inductor.utils").fresh_inductor_cache()
        cache.__enter__()
        # Not the job's error, for which it would leave its directory on disk.
        training.ending.callback(cache.__exit__, None, None, None)
        config: Any = importlib.import_module("torch._inductor.config")
        # No more processes than the job has cores.
        threads = min(torch.get_num_threads(), config.compile_threads or 1)
        training.ending.enter_context(config.patch(compile_threads=threads))
        self._graphs = (compiled_graphs(), 0)
        model = training.model
        by_layer = self.compile_scope == "layers"
        if by_layer:
            kinds = {
                n for m in model.modules() for n in getattr(m, "_no_split_modules", None) or ()
            }
            self._compiled += [m for m in model.modules() if type(m).__name__ in kinds]
            if not self._compiled:
                raise Unsupported(
                    f"compile_scope layers: {type(model).__name__} does not say what its layers "
                    "are; write compile_scope: model"
                )
        else:
            self._compiled.append(model)
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


def compiled_graphs() -> int:
    """Number of graphs that this process has compiled so far."""
    return torch_compilations().graphs or 0


class Attention(Technique):
    """Attention implementation: the code that computes softmax(QKᵀ)V, and how much it writes out.

    *Eager* attention writes the whole score matrix, positions × positions for every head, which
    grows with the square of the length. *sdpa*, PyTorch's scaled_dot_product_attention, picks a
    kernel that works in tiles and keeps none of it. *flash_attention_2* (package flash-attn) and
    *xformers* (which no card has run) bring kernels of their own, for NVIDIA cards. All compute
    the same.
    """

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "attention implementation"
    order: ClassVar[int] = 90
    always: ClassVar[bool] = True

    attention: Literal["sdpa", "eager", "flash_attention_2", "xformers"] = choice_in_id(
        "sdpa",
        loads=True,
        description="Attention implementation: sdpa is PyTorch's scaled_dot_product_attention, "
        "eager plain matrix products, flash_attention_2 and xformers the kernels of those packages "
        "(CUDA only).",
    )

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        yield from refusals(job)
        half = job.precision != "fp32" or job.parameters.get("autocast", "none") != "none"
        if self.attention == "flash_attention_2" and not half:
            yield Refusal(
                setting="attention",
                reason="flash_attention_2 computes in fp16 and bf16 only, and this job in fp32",
                hint="write precision: bf16, or autocast: bf16",
            )

    def before_load(self, loading: Loading) -> None:
        from workloads.models.loading import check_attention

        make_ready(self.attention)
        loading.model_arguments["attn_implementation"] = self.attention
        loading.checks.append(lambda model, tokenizer: check_attention(model, self.attention))

    def on_model(self, training: Training) -> None:
        from workloads.models.loading import check_attention

        inner = training.base_model
        running = getattr(inner.config, "_attn_implementation", self.attention)
        fallback = (self.attention, running) == ("sdpa", "eager")
        said = check_attention(inner, self.attention) if fallback else self.attention
        training.details["attention"] = said


class FusedKernels(Technique):
    """Fused kernels: norms, gates and the loss in one pass each.

    Between its products a layer reads and writes its activations a dozen times, and keeps several
    of them for the way back. The package liger-kernel (``pip install liger-kernel``) brings
    Triton kernels that make one pass of a norm, of SiLU(gate) · up and, with ``logits: chunked``,
    of the loss, and keep less. Its own patches replace functions and classes of transformers, which
    the next job of a warm worker would meet, and know no GLM. Here the modules of the job's model
    alone are given the kernels, each after it was seen to compute the same, and lose them after the
    last step; the row says how many did. ``torch_compile`` fuses the same passes by itself, on
    other devices too.
    """

    name: ClassVar[str] = "fused-kernels"
    title: ClassVar[str] = "fused kernels"
    order: ClassVar[int] = 107  # of the layers as the techniques before have made them
    needs: ClassVar[tuple[str, ...]] = ("pack",)
    capabilities: ClassVar[Any] = {"fused_kernels": "liger_kernels"}
    whole_weights: ClassVar[Any] = ("fused_kernels",)
    excludes: ClassVar[Any] = (
        (
            "fused_kernels",
            "torch_compile",
            (True,),
            "torch_compile fuses the same passes into kernels of its own",
        ),
    )

    fused_kernels: Literal["none", "liger"] = choice(
        "none",
        description="Kernels of norms, gated layers and, with logits: chunked, of the loss: those "
        "that the model's code calls, or the package liger-kernel's, one pass each (CUDA only).",
    )

    def before_load(self, loading: Loading) -> None:
        for package in ("liger-kernel", "triton"):
            require_package(package, "fused_kernels liger", "'liger-kernel>=0.8.5,<0.9'")
        if lacking := loading.device.cannot_compile():  # kernels are compiled when first called
            raise Unsupported(f"fused_kernels liger: {lacking}")

    def on_model(self, training: Training) -> None:
        from workloads.training.fused_kernels import fuse, liger
        from workloads.training.losses import ChunkedLoss, summed

        kernels = liger()
        counts, undo = fuse(training.model, kernels)
        training.undo.callback(undo)
        parts = [f"{count} {part}" for part, count in counts.items()]
        if isinstance(loss := training.loss, ChunkedLoss):
            parts.append("loss")
            loss.cross_entropy = kernels.cross_entropy
            training.undo.callback(setattr, loss, "cross_entropy", summed)
        if not parts:
            raise Unsupported(
                f"fused_kernels liger: {type(training.model).__name__} has no norm or gated layer "
                "that the kernels compute; leave fused_kernels out"
            )
        training.details["fused_kernels"] = f"{kernels.title}: {', '.join(parts)}"


class LearnedLogits(Technique):
    """Logits of learned positions: the last layer computes only what the loss looks at.

    The last layer of a language model is one product with the whole vocabulary, for every position,
    and the loss makes several passes over what comes out. Yet a prompt's tokens are not learned,
    and padding is not. With *learned* only the positions go through the last layer at which some
    sample of the micro-batch has something to learn; the loss is the same sum. With *chunked* those
    of a hundred positions at a time, whose part of the loss and of the gradients is computed before
    the next.
    """

    name: ClassVar[str] = "learned-logits"
    title: ClassVar[str] = "logits of learned positions"
    order: ClassVar[int] = 100
    needs: ClassVar[tuple[str, ...]] = ("positions",)
    capabilities: ClassVar[Any] = {"logits": "dynamic_shapes"}
    whole_weights: ClassVar[Any] = (("logits", "chunked"),)
    excludes: ClassVar[Any] = (
        (
            ("logits", "chunked"),
            "autocast",
            ("bf16", "fp16"),
            "chunked computes the last layer in the precision of its weights, outside of autocast",
        ),
        (
            ("logits", "chunked"),
            "method",
            ("qat", "qat-lora"),
            "chunked leaves the last layer out of the model, which QAT converts whole",
        ),
    )

    logits: Literal["all", "learned", "chunked"] = choice_in_id(
        "all",
        description="Positions that go through the model's last layer: all, or those at which a "
        "sample of the micro-batch has something to learn. Shapes then change from step to step. "
        "chunked: each learned position alone, some at a time together with their loss.",
    )

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        of_all = self.logits == "chunked" and one_shape(job.parameters)
        if compiles_whole(job.parameters) and not of_all:
            yield Refusal(
                setting="logits",
                reason="with torch_compile every new number of positions would be compiled",
                hint="write logits: all, or compile_scope: layers",
            )

    def on_model(self, training: Training) -> None:
        inner = training.base_model
        if self.logits == "chunked":
            from workloads.training.losses import without_last_layer

            training.loss = without_last_layer(inner, training.device.torch_device)
            return
        if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
            raise Unsupported(
                f"logits learned: {type(inner).__name__} always computes the logits of all "
                "positions; write logits: all"
            )
        training.positions = training.task.function("positions")


SPECS = (Compilation, Attention, FusedKernels, LearnedLogits)
