"""Fused kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import JobDescription, Refusal, Unsupported
from workloads.parallel.strategy_rules import whole_weights_refusals
from workloads.settings import setting
from workloads.techniques.base import Loading, Technique, Training


class FusedKernels(Technique):
    """Fused kernels: norms, gates, rotary embeddings and the loss in one pass each.

    Between its products a layer reads and writes its activations a dozen times, and keeps several
    of them for the way back. The package liger-kernel (``pip install 'nightgrid[liger]'``) brings
    Triton kernels that make one pass of a norm, of SiLU(gate) · up, of turning queries and keys
    and, with ``logits: chunked``, of the loss, and keep less. Its own patches replace functions and
    classes of transformers, which the next job of a warm worker would meet, and know no GLM. Here
    the modules of the job's model alone are given the kernels, each after it was seen to compute
    the same, and lose them after the last step; the row says how many did. ``torch_compile`` fuses
    the same passes by itself, on other devices too.
    """

    name: ClassVar[str] = "fused-kernels"
    title: ClassVar[str] = "fused kernels"
    order: ClassVar[int] = 107  # of the layers as the techniques before have made them
    needs: ClassVar[tuple[str, ...]] = ("pack",)
    capabilities: ClassVar[Any] = {"fused_kernels": "liger_kernels"}

    fused_kernels: Literal["none", "liger"] = setting(
        "none",
        role="choice",
        description="Kernels of norms, gated layers, rotary embeddings and, with logits: chunked, "
        "of the loss: those that the model's code calls, or the package liger-kernel's, one pass "
        "each (CUDA only; run on no card yet, its kernels by Triton's interpreter).",
    )

    _undo: list[Callable[[], None]] = PrivateAttr(default_factory=list)

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if self.fused_kernels == "none":
            return
        if asked.parameters.get("torch_compile"):
            yield Refusal(
                setting="fused_kernels",
                reason="torch_compile fuses the same passes into kernels of its own",
                hint="write torch_compile: false, or leave fused_kernels out",
            )
        yield from whole_weights_refusals(asked, "fused_kernels", value=self.fused_kernels)

    def before_load(self, loading: Loading) -> None:
        if self.fused_kernels == "none":
            return
        for package in ("liger-kernel", "triton"):
            if importlib.util.find_spec(package.replace("-", "_")) is None:
                raise Unsupported(
                    f"fused_kernels liger needs the package '{package}', which is not installed "
                    "here; install it with: pip install 'nightgrid[liger]'"
                )
        if lacking := loading.device.cannot_compile():  # kernels are compiled when first called
            raise Unsupported(f"fused_kernels liger: {lacking}")

    def on_model(self, training: Training) -> None:
        if self.fused_kernels == "none":
            return
        from workloads.training.chunked_loss import ChunkedLoss, summed
        from workloads.training.fused import fuse
        from workloads.training.liger import liger

        kernels = liger()
        found, undo = fuse(training.model, kernels)
        self._undo.append(undo)
        training.ending.callback(undo)  # where a job fails
        parts = [f"{count} {part}" for part, count in found.items()]
        if isinstance(loss := training.loss, ChunkedLoss):
            parts.append("loss")
            loss.cross_entropy = kernels.cross_entropy
            self._undo.append(lambda: setattr(loss, "cross_entropy", summed))
        if not parts:
            raise Unsupported(
                f"fused_kernels liger: {type(training.model).__name__} has no norm, gated layer or "
                "rotary embedding that the kernels compute; leave fused_kernels out"
            )
        training.details["fused_kernels"] = f"{kernels.title}: {', '.join(parts)}"

    def after_steps(self, training: Training) -> None:
        for undo in self._undo:
            undo()


SPECS = (FusedKernels,)
