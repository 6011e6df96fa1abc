"""A teacher beside its student: what it says of each batch, and the time that this takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.techniques.base import DataPlan, Inputs

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class Taught:
    """A teacher at work."""

    teacher: Any
    directory: Path
    training: Any = None  # from ``on_model`` on
    kept: Any = None
    stamps: list[tuple[Any, Any]] = field(default_factory=list)  # of this step
    counted: list[tuple[Any, Any]] = field(default_factory=list)  # of all steps but the first
    ends: list[Any] = field(default_factory=list)

    def logits(self, inputs: Inputs, kept: Any) -> torch.Tensor:
        """The teacher's logits, without gradients."""
        import torch

        device = self.training.device
        began = device.stamp()
        with torch.no_grad():
            found = self.training.logits(self.teacher, inputs, kept)
        device.mark_step()
        if torch.is_grad_enabled():
            self.stamps.append((began, device.stamp()))
        return found  # type: ignore[no-any-return]

    def divergence(
        self, inputs: Inputs, logits: torch.Tensor, kept: Any, temperature: float
    ) -> torch.Tensor:
        """Summed KL divergence, by the kept logits where a batch brings such."""
        from workloads.training.teaching import summed_kl, summed_kl_of_largest

        aligned = self.training.task.function("aligned")
        student, labels = aligned(logits, inputs.labels, kept)
        values, ids = inputs.guide_values, inputs.guide_ids
        if values is None or ids is None:
            teacher, _ = aligned(self.logits(inputs, kept), inputs.labels, kept)
            return summed_kl(student, teacher, labels, temperature)
        if kept is not None:
            values, ids = values[:, kept], ids[:, kept]
        values, ids = (aligned(guide, inputs.labels, kept)[0] for guide in (values, ids))
        return summed_kl_of_largest(student, values, ids, labels, temperature)

    def plain_divergence(self, inputs: Inputs, logits: torch.Tensor, kept: Any) -> torch.Tensor:
        """Summed KL divergence from the whole of the teacher's distribution, at temperature 1."""
        from workloads.training.teaching import summed_kl

        aligned = self.training.task.function("aligned")
        student, labels = aligned(logits, inputs.labels, kept)
        teacher, _ = aligned(self.logits(inputs, kept), inputs.labels, kept)
        return summed_kl(student, teacher, labels, 1.0)

    def own_loss(self, inputs: Inputs, logits: torch.Tensor, kept: Any) -> torch.Tensor:
        """The teacher's loss, whatever the student's logits."""
        loss: torch.Tensor = self.training.plain_loss(inputs, self.logits(inputs, kept), kept)
        return loss

    def keep(self, samples: Sequence[Any], data: DataPlan, collate: Any) -> None:
        """Have the largest logits of these samples; from the node's cache, if they are there."""
        import torch

        from workloads.models.layouts import fingerprint
        from workloads.training.teaching import LARGEST, keep_logits

        def largest(some: Sequence[Any]) -> list[tuple[Any, Any]]:
            inputs = data.move(collate(some))
            with torch.no_grad():
                logits = self.training.logits(self.teacher, inputs, None).float()
            found = logits.topk(min(LARGEST, logits.shape[-1]), dim=-1)
            parts = []
            for row, sample in enumerate(some):
                place = slice(sample.prompt_tokens - 1, len(sample.ids) - 1)
                values = found.values[row, place].cpu().numpy()
                parts.append((values, found.indices[row, place].cpu().numpy().astype("int32")))
            return parts

        identity = f"{fingerprint(self.directory)} {self.arithmetic()}"
        self.kept = keep_logits(samples, identity, largest, data.batch_size)

    def arithmetic(self) -> str:
        """All that the teacher's logits depend on beside its weights and the samples."""
        import torch

        kind = self.training.device.spec.torch_type
        with self.training.in_forward():
            mixed = torch.is_autocast_enabled(kind)
            autocast = str(torch.get_autocast_dtype(kind)) if mixed else "none"
        attention = getattr(self.teacher.config, "_attn_implementation", None)
        # oneDNN in fp32 has the switch of products in bf16.
        by_onednn = "matmul_backend" in self.training.details
        products = "onednn" if by_onednn else torch.get_float32_matmul_precision()
        return f"{self.teacher.dtype} {autocast} {attention} {products} {kind}"

    def end_step(self) -> None:
        """Count the teacher's time; of this attempt's first step no beginning is known."""
        if self.ends:
            self.counted += self.stamps
        self.stamps = []
        self.ends.append(self.training.device.stamp())

    def share(self) -> float | None:
        """Share of the steps' time that the teacher took."""
        device = self.training.device
        device.synchronize()
        steps = [(self.ends[0], self.ends[-1])] if len(self.ends) > 1 else []
        whole, own = device.seconds_in(steps), device.seconds_in(self.counted)
        return own / whole if whole and own is not None else None
