"""Which library multiplies fp32 matrices on a CPU.

PyTorch gives them to the BLAS that it was built with, on x86 MKL, which uses half of the width of
AMD's vectors: on a Zen 5 core 110 of 270 GFLOP/s. oneDNN, which PyTorch brings along as well, uses
all of it (250). The switch that has PyTorch ask oneDNN is the one for products in bf16, and where
the processor has no units that oneDNN would take for those it multiplies in fp32, as before. That
is tried out on the spot; the sums are the same ones in another order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from workloads.errors import Unsupported
from workloads.refusal import Asked, Refusal
from workloads.settings import setting
from workloads.techniques.base import Technique, Training

#: Of sums in fp32 in another order; a factor in bf16 is off by some thousandths.
_ROUNDING = 1e-5


class MatmulBackend(Technique):
    """The library of fp32 matrix products on a CPU."""

    name: ClassVar[str] = "matmul-backend"
    title: ClassVar[str] = "library of matrix products on CPUs"
    order: ClassVar[int] = 81

    matmul_backend: Literal["default", "onednn"] = setting(
        "default",
        role="choice",
        description="Which library multiplies fp32 matrices on a CPU: PyTorch's own choice (MKL on "
        "x86), or oneDNN, in fp32 as well; on AMD's processors oneDNN is twice as fast.",
    )

    def refusals(self, asked: Asked) -> Iterable[Refusal]:
        if self.matmul_backend == "default":
            return
        if not asked.on.can("onednn"):
            yield Refusal(
                setting="matmul_backend",
                reason=f"oneDNN is for CPUs, not for {asked.on.title}",
                hint="leave matmul_backend out",
                unsupported=True,
            )
        if asked.precision != "fp32" or asked.parameters.get("autocast", "none") != "none":
            yield Refusal(
                setting="matmul_backend",
                reason="it is about fp32 products, of which this job has none",
                hint="write precision: fp32 and no autocast, or leave matmul_backend out",
            )
        if asked.parameters.get("matmul_precision", "highest") != "highest":
            yield Refusal(
                setting="matmul_backend",
                reason="PyTorch has one switch for both, and matmul_precision is set too",
                hint="leave one of the two out",
            )

    def on_model(self, training: Training) -> None:
        if self.matmul_backend != "default":
            training.details["matmul_backend"] = multiply_by_onednn()


def multiply_by_onednn() -> str:
    """Have oneDNN multiply fp32 matrices until the job ends; what it does here, for the row.

    Raises:
        Unsupported: there is no oneDNN here, or it would round factors to bf16.
    """
    import torch

    if not torch.backends.mkldnn.is_available():
        raise Unsupported("matmul_backend onednn: this build of PyTorch comes without oneDNN")
    numbers = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=numbers) for _ in range(2))
    exact = left.double() @ right.double()
    torch.set_float32_matmul_precision("medium")  # undone after the job
    error = float((left @ right - exact).abs().max() / exact.abs().max())
    if error > _ROUNDING:
        torch.set_float32_matmul_precision("highest")
        raise Unsupported(
            f"matmul_backend onednn: oneDNN would multiply in bf16 on this processor (relative "
            f"error {error:.1e}); matmul_precision: medium asks for that"
        )
    return f"onednn, relative error {error:.1e}"


SPEC = MatmulBackend
