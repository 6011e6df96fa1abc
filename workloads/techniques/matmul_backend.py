"""The library that multiplies fp32 matrices on a CPU.."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.base import JobDescription, Refusal, Unsupported
from workloads.settings import setting
from workloads.techniques.base import Technique, Training
from workloads.techniques.matmul_precision import ROUNDING, error_with

if TYPE_CHECKING:
    from workloads.devices.base import Device


class MatmulBackend(Technique):
    """The library that multiplies fp32 matrices on a CPU.

    PyTorch gives them to the BLAS that it was built with, on x86 MKL, which uses half of the width
    of AMD's vectors: on a Zen 5 core 110 of 270 GFLOP/s. oneDNN, which PyTorch brings along as
    well, uses all of it (250). The switch that has PyTorch ask oneDNN is the one for products in
    bf16; on a processor that has AVX-512 but no units for those, it multiplies in fp32, in another
    order. What the switch does is tried out on the spot. It holds for all products, and those of
    PyTorch's attention over short samples become slower.
    """

    name: ClassVar[str] = "matmul-backend"
    title: ClassVar[str] = "library of matrix products on CPUs"
    order: ClassVar[int] = 81
    capabilities: ClassVar[Any] = {"matmul_backend": "onednn"}

    matmul_backend: Literal["default", "onednn"] = setting(
        "default",
        role="choice",
        description="Which library multiplies fp32 matrices on a CPU: PyTorch's own choice (MKL on "
        "x86), or oneDNN, in fp32 as well, which is twice as fast on AMD's processors. PyTorch's "
        "attention over short samples is slower with it.",
    )

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        if self.matmul_backend == "default":
            return
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
            training.details["matmul_backend"] = multiply_by_onednn(training.device)


def multiply_by_onednn(device: Device) -> str:
    """Have oneDNN multiply fp32 matrices until the job ends; what it does here, for the row.

    Raises:
        Unsupported: it multiplies nothing here, or would round factors to bf16.
    """
    import torch

    error, reason = error_with("medium", device), ""
    if error > ROUNDING:
        reason = (
            f"oneDNN would multiply in bf16 on this processor (relative error {error:.1e}); "
            "matmul_precision: medium asks for that"
        )
    elif not error:
        reason = "PyTorch does not ask oneDNN for products on this processor"
    if reason:
        torch.set_float32_matmul_precision("highest")
        raise Unsupported(f"matmul_backend onednn: {reason}")
    return f"onednn, relative error {error:.1e}"


SPECS = (MatmulBackend,)
