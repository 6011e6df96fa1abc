"""Techniques of precision: autocast, bits of fp32 products, and the library that multiplies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.base import JobDescription, Refusal, Unsupported
from workloads.devices import device_spec
from workloads.registry import Metric
from workloads.settings import choice, choice_in_id
from workloads.training.technique import Technique, Training

if TYPE_CHECKING:
    from workloads.devices.base import Device


class Autocast(Technique):
    """Automatic mixed precision: weights in one format, products in a shorter one.

    Under autocast, matrix products run in bf16 or fp16 while weights, sums and the optimizer keep
    the job's precision. fp16 has so few exponents that small gradients vanish: the loss is scaled
    up before the backward pass, gradients are scaled down before the update, and a step whose
    gradients overflowed is left out. bf16 has the exponents of fp32 and needs none of that.
    """

    name: ClassVar[str] = "autocast"
    title: ClassVar[str] = "mixed precision"
    order: ClassVar[int] = 70
    always: ClassVar[bool] = True  # weights in fp16 need it
    capabilities: ClassVar[Any] = {("autocast", "fp16"): "loss_scaling"}
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="skipped_steps",
            title="steps left out",
            description="Steps whose gradients overflowed in fp16, so that nothing was learned.",
            better="lower",
        ),
        Metric(
            name="loss_scale",
            title="loss scale",
            description="Factor of the loss after the last step under autocast in fp16.",
        ),
    )

    autocast: Literal["none", "bf16", "fp16"] = choice_in_id(
        "none",
        description="Format of matrix products under automatic mixed precision, with weights in "
        "the job's precision: bf16, or fp16 with loss scaling; none computes in the precision.",
    )

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        if job.precision == "fp16" and self.autocast != "fp16":
            yield Refusal(
                setting="precision",
                reason="training in plain fp16 ends in NaN, since small gradients become 0",
                hint="write autocast: fp16 (loss scaling), or precision: bf16",
            )
        if job.precision == "bf16" and self.autocast == "fp16":
            yield Refusal(
                setting="autocast",
                reason="fp16 products of bf16 weights lose range and precision at once",
                hint="write autocast: bf16, or precision: fp32",
            )

    def on_model(self, training: Training) -> None:
        if self.autocast == "none":
            return
        import torch

        kind = training.device.spec.torch_type
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.autocast]
        training.around_forward.append(lambda: torch.autocast(kind, dtype=dtype))

    def on_optimizer(self, training: Training) -> None:
        if self.autocast != "fp16":
            return
        import torch

        scaler = torch.amp.GradScaler(training.device.spec.torch_type)
        training.stateful["loss scale"] = scaler

        def backward(loss: torch.Tensor) -> None:
            scaler.scale(loss).backward()

        def update() -> None:
            if training.before_update:  # they see gradients as they are
                scaler.unscale_(training.optimizer)
            for act in training.before_update:
                act()
            scaler.step(training.optimizer)
            before = scaler.get_scale()
            scaler.update()
            after = training.metrics["loss_scale"] = scaler.get_scale()
            skipped = training.metrics.get("skipped_steps", 0.0)
            training.metrics["skipped_steps"] = skipped + (after < before)
            training.optimizer.zero_grad(set_to_none=True)

        training.backward, training.update = backward, update


#: Relative error of fp32 sums in another order; TF32 and bf16 lie far above.
ROUNDING = 1e-5


def refusals(job: JobDescription, otherwise: str) -> Iterator[Refusal]:
    """Objections to reduced precision; ``otherwise`` is the hint for devices without it."""
    autocast = job.parameters.get("autocast", "none")
    if job.parameters.get("matmul_precision") in (None, "highest"):
        return
    if job.precision != "fp32":
        yield Refusal(
            setting="matmul_precision",
            reason=f"it is about fp32 products, and those of this job are in {job.precision}",
            hint="write precision: fp32, or leave matmul_precision out",
        )
    elif autocast != "none":
        yield Refusal(
            setting="matmul_precision",
            reason=f"autocast computes products in {autocast}, and none is left in fp32",
            hint="leave one of the two out",
        )
    if not device_spec(job.device).can("matmul_precision"):
        yield Refusal(
            setting="matmul_precision",
            reason=f"{device_spec(job.device).title} does not know PyTorch's matmul precision",
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

    matmul_precision: Literal["highest", "high", "medium"] = choice_in_id(
        "highest",
        description="How exactly fp32 matrix products are computed: highest in fp32, high in TF32, "
        "medium in bf16 where the card can. For jobs in fp32 without autocast.",
    )

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        return refusals(job, "write autocast: bf16 and matmul_precision: highest")

    def on_model(self, training: Training) -> None:
        effect = in_force(self.matmul_precision, training.device)
        training.details["matmul_precision"] = effect


def in_force(precision: str, device: Device) -> str:
    """Set a precision until the job ends and describe it; Unsupported without effect."""
    error = error_with(precision, device)
    if error < ROUNDING:
        raise Unsupported(
            f"matmul_precision {precision} changes nothing on {device.device_name()}: its fp32 "
            f"products stay as exact as they were (relative error {error:.1e})"
        )
    return f"{precision}, relative error {error:.1e}"


def error_with(precision: str, device: Device) -> float:
    """Set a precision until the job ends; return products' largest change over their maximum."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=numbers) for _ in range(2))
    card = device.torch_device
    left, right = left.to(card), right.to(card)
    exact = left @ right
    torch.set_float32_matmul_precision(precision)  # undone after the job
    return float((left @ right - exact).abs().max() / exact.abs().max())


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
    excludes: ClassVar[Any] = (
        (
            "matmul_backend",
            "matmul_precision",
            ("high", "medium"),
            "PyTorch has one switch for both, and matmul_precision is set too",
        ),
    )

    matmul_backend: Literal["default", "onednn"] = choice(
        "default",
        description="Which library multiplies fp32 matrices on a CPU: PyTorch's own choice (MKL on "
        "x86), or oneDNN, in fp32 as well, which is twice as fast on AMD's processors. PyTorch's "
        "attention over short samples is slower with it.",
    )

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        if job.precision != "fp32" or job.parameters.get("autocast", "none") != "none":
            yield Refusal(
                setting="matmul_backend",
                reason="it is about fp32 products, of which this job has none",
                hint="write precision: fp32 and no autocast, or leave matmul_backend out",
            )

    def on_model(self, training: Training) -> None:
        training.details["matmul_backend"] = multiply_by_onednn(training.device)


def multiply_by_onednn(device: Device) -> str:
    """Use oneDNN for fp32 products in this job; Unsupported if it has no effect or rounds."""
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


SPECS = (Autocast, MatmulPrecision, MatmulBackend)
