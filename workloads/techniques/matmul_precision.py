"""Matrix products of fp32 numbers in fewer bits than they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from workloads.base import JobDescription, Refusal, Unsupported
from workloads.settings import setting
from workloads.techniques.base import Technique, Training

if TYPE_CHECKING:
    from workloads.devices.base import Device

#: Of sums in fp32 in another order; TF32 and bf16 lie far above.
ROUNDING = 1e-5


def refusals(asked: JobDescription, otherwise: str) -> Iterator[Refusal]:
    """Objections to fewer bits in a job's products; ``otherwise`` is said where the device knows
    only the exact ones."""
    autocast = asked.parameters.get("autocast", "none")
    if asked.parameters.get("matmul_precision") in (None, "highest"):
        return
    if asked.precision != "fp32":
        yield Refusal(
            setting="matmul_precision",
            reason=f"it is about fp32 products, and those of this job are in {asked.precision}",
            hint="write precision: fp32, or leave matmul_precision out",
        )
    elif autocast != "none":
        yield Refusal(
            setting="matmul_precision",
            reason=f"autocast computes products in {autocast}, and none is left in fp32",
            hint="leave one of the two out",
        )
    if not asked.on.can("matmul_precision"):
        yield Refusal(
            setting="matmul_precision",
            reason=f"{asked.on.title} does not know PyTorch's matmul precision",
            hint=otherwise,
            unsupported=True,
        )


class MatmulPrecision(Technique):
    """Matrix products of fp32 numbers in fewer bits than they have: TF32 and bf16 passes.

    Tensor cores do not multiply fp32. In TF32 they read 10 of the 23 bits of a mantissa, add up in
    fp32, and are several times faster than the units that compute exactly. PyTorch leaves this off
    unless told: *highest* is exact, *high* allows TF32 (or sums of three bf16 products), *medium*
    bf16. Weights stay fp32, so this belongs to jobs in fp32 without autocast. Whether a setting
    does anything depends on the card, so it is tried out on the spot.
    """

    name: ClassVar[str] = "matmul-precision"
    title: ClassVar[str] = "TF32 / matmul precision"
    order: ClassVar[int] = 80

    matmul_precision: Literal["highest", "high", "medium"] = setting(
        "highest",
        role="choice",
        always_in_id=True,
        description="How exactly fp32 matrix products are computed: highest in fp32, high in TF32, "
        "medium in bf16 where the card can. For jobs in fp32 without autocast.",
    )

    def refusals(self, asked: JobDescription) -> Iterable[Refusal]:
        return refusals(asked, "write autocast: bf16 and matmul_precision: highest")

    def on_model(self, training: Training) -> None:
        if self.matmul_precision != "highest":
            found = in_force(self.matmul_precision, training.device)
            training.details["matmul_precision"] = found


def in_force(precision: str, device: Device) -> str:
    """Put a precision in force until the job ends; what it does here, for the row.

    Raises:
        Unsupported: the card computes as before.
    """
    error = error_with(precision, device)
    if error < ROUNDING:
        raise Unsupported(
            f"matmul_precision {precision} changes nothing on {device.device_name()}: its fp32 "
            f"products stay as exact as they were (relative error {error:.1e})"
        )
    return f"{precision}, relative error {error:.1e}"


def error_with(precision: str, device: Device) -> float:
    """Put a precision in force until the job ends; how far products then are from those before, as
    a share of the greatest: 0 where they are the same ones."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=numbers) for _ in range(2))
    card = device.torch_device
    left, right = left.to(card), right.to(card)
    exact = left @ right
    torch.set_float32_matmul_precision(precision)  # undone after the job
    return float((left @ right - exact).abs().max() / exact.abs().max())


SPECS = (MatmulPrecision,)
