"""Distillation: the technique, and a teacher beside its student in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from workloads.base import BadConfiguration, JobDescription, Metric, Refusal
from workloads.compression import teaching
from workloads.models.catalog import checkpoint_kind, known_config, vocabulary_size
from workloads.settings import setting
from workloads.training.methods import method_name
from workloads.training.parallel.layout import model_parallel_size
from workloads.training.technique import DataPlan, Inputs, Loading, Technique, Training

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
        from workloads.compression.teaching import summed_kl, summed_kl_of_largest

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
        from workloads.compression.teaching import summed_kl

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

        from workloads.compression.teaching import LARGEST, keep_logits
        from workloads.models.checkpoints import fingerprint

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


_METHOD = "distill"
USUAL_ALPHA, USUAL_TEMPERATURE = 0.5, 2.0


class Distillation(Technique):
    """Distillation: a small model learns what a large one would say, and not only what was said.

    A teacher's distribution over the next token tells more than the one token of the text. The
    student (method distill) learns from both: α·T²·KL + (1 − α)·cross entropy, over the positions
    that are learned. It is a checkpoint of its own (``model`` the student, ``teacher`` the other),
    or made from ``model``, which then teaches: ``student_layers`` copies every n-th layer,
    ``student_hidden`` makes a narrower one with new weights. The teacher takes about a third of
    each step; kept on disk, its 64 largest logits of each position are computed once.
    """

    name: ClassVar[str] = "distillation"
    title: ClassVar[str] = "distillation"
    order: ClassVar[int] = 45  # the student is what all that follow see; after padding
    needs: ClassVar[tuple[str, ...]] = ("aligned",)
    beside: ClassVar[Any] = dict.fromkeys(
        (
            *("teacher", "student_layers", "student_hidden"),
            *("distillation_alpha", "temperature", "teacher_logits"),
        ),
        ("method", (_METHOD,)),
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="teacher_share",
            title="teacher's share",
            description="Share of the steps' time in which the teacher computes, the first step "
            "left out.",
            better="lower",
        ),
        Metric(
            name="held_out_kl_before",
            title="held-out KL before",
            description="KL divergence of the student from the teacher at the learned tokens of "
            "held-out examples, before the first step.",
        ),
        Metric(
            name="held_out_kl",
            title="held-out KL",
            description="The same of the model that training leaves.",
            better="lower",
        ),
        Metric(
            name="teacher_held_out_loss",
            title="teacher's held-out loss",
            description="Held-out loss of the teacher.",
        ),
        Metric(
            name="teacher_parameters",
            title="teacher",
            unit="parameters",
            description="Parameters of the teacher.",
        ),
        Metric(
            name="student_parameters",
            title="student",
            unit="parameters",
            description="Parameters of the student.",
        ),
    )

    teacher: str | None = setting(
        None,
        role="work",
        loads=True,
        consumes="model",
        min_length=1,
        description="The model that teaches, where the student (`model`) is a checkpoint of its "
        "own (method distill). Left out: `model` teaches a student that is made from it.",
    )
    student_layers: int | None = setting(
        None,
        role="work",
        loads=True,
        ge=1,
        description="Layers of the student that is made from the model: every n-th of its layers, "
        "copied (new ones with student_hidden).",
    )
    student_hidden: int | None = setting(
        None,
        role="work",
        loads=True,
        ge=1,
        description="Width (hidden size) of the student, whose weights are then new.",
    )
    distillation_alpha: float | None = setting(
        None,
        role="work",
        ge=0,
        le=1,
        description="Part α of the loss that comes from the teacher. Left out: 0.5.",
    )
    temperature: float | None = setting(
        None,
        role="work",
        gt=0,
        le=100,
        description="Temperature T of both distributions. Left out: 2.",
    )
    teacher_logits: Literal["computed", "kept"] | None = setting(
        None,
        role="choice",
        description="computed asks the teacher in every step; kept writes its 64 largest logits of "
        "each learned position into the node's cache, once, and reads them from there. Left out: "
        "computed.",
    )

    _taught: list[Taught] = PrivateAttr(default_factory=list)

    # ------------------------------------------------------------ in the plan

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        if method_name(job.parameters) != _METHOD:
            return
        made = [n for n in ("student_layers", "student_hidden") if getattr(self, n) is not None]
        if self.teacher is None and not made:
            yield Refusal(
                setting="method",
                reason="the teacher would be the student: nothing says how they differ",
                hint="name a teacher, or set student_layers or student_hidden",
            )
        elif self.teacher == job.model:
            yield Refusal(
                setting="teacher",
                reason=f"{self.teacher} is the student as well",
                hint="leave teacher out and set student_layers, or name another model",
            )
        elif self.teacher is not None and made:
            yield Refusal(
                setting=made[0],
                reason=f"the student is {job.model} as it is, since {self.teacher} teaches it",
                hint=f"leave teacher out to make a student from the model, or leave {made[0]} out",
            )
        yield from self._sizes(job)
        yield from self._together(job)

    def _sizes(self, job: JobDescription) -> Iterator[Refusal]:
        config = known_config(job.model) or {}
        other = known_config(self.teacher) if self.teacher is not None else None
        ours, theirs = vocabulary_size(config), vocabulary_size(other or {})
        if ours and theirs and ours != theirs:
            yield Refusal(
                setting="teacher",
                reason=f"{self.teacher} has a vocabulary of {theirs:,} tokens and {job.model} "
                f"one of {ours:,}, so their distributions are over different things",
                hint="name a teacher with the student's tokenizer",
            )
        there = config.get("num_hidden_layers")
        if self.student_layers and not self.student_hidden and isinstance(there, int):
            if self.student_layers > there:
                yield Refusal(
                    setting="student_layers",
                    reason=f"{job.model} has {there} layers to copy",
                    hint=f"write at most {there}, or set student_hidden for new weights",
                )
            elif self.student_layers == there:
                yield Refusal(
                    setting="student_layers",
                    reason=f"{job.model} has {there} layers: the student would be its teacher",
                    hint=f"write fewer than {there}",
                )
        size = config.get("head_dim")
        if self.student_hidden and isinstance(size, int) and self.student_hidden % size:
            yield Refusal(
                setting="student_hidden",
                reason=f"the heads of {job.model} have {size} channels, which do not divide "
                f"{self.student_hidden}",
                hint=f"write a multiple of {size}",
            )

    def _together(self, job: JobDescription) -> Iterator[Refusal]:
        kind = checkpoint_kind(job.model)
        pairs = kind is not None and kind.encoder_decoder
        if pairs and (self.student_layers or self.student_hidden):
            yield Refusal(
                setting="student_layers" if self.student_layers else "student_hidden",
                reason="this version makes students of models that are one decoder",
                hint="name a student checkpoint as model, and the teacher",
                unsupported=True,
            )
        if model_parallel_size(job.parameters, job.cards) > 1:
            yield Refusal(
                setting="method",
                reason="this version has no teacher beside a model in parts",
                hint="write strategy: ddp",
                unsupported=True,
            )
        if job.parameters.get("logits") == "chunked":
            yield Refusal(
                setting="logits",
                reason="a teacher is compared by logits, which chunked never has",
                hint="write logits: all or learned",
            )
        if self.teacher_logits != "kept":
            return
        if pairs:
            reason, hint = "this version keeps logits of models that are one decoder", "computed"
        elif job.parameters.get("padding") == "packing":
            reason, hint = "kept logits are of one sample a row", "computed, or padding: dynamic"
        elif job.parameters.get("data_workers"):
            reason = "kept logits are added to batches in the training process"
            hint = "computed, or data_workers: 0"
        else:
            return
        yield Refusal(setting="teacher_logits", reason=reason, hint=f"write {hint}")

    # ------------------------------------------------------------ in training

    @property
    def in_training(self) -> list[Taught]:
        """The teacher of the model that this job trains, once it is loaded."""
        return self._taught

    def before_load(self, loading: Loading) -> None:
        if loading.method == _METHOD:
            loading.changes.append(
                lambda model, tokenizer, task: self._meet(model, tokenizer, task, loading)
            )

    def _meet(self, model: Any, tokenizer: Any, task: Any, loading: Loading) -> Any:
        """The student, given the model as loaded; the teacher is kept.

        Raises:
            BadConfiguration: the two have unlike vocabularies.
        """
        if self.teacher is None:
            teacher = model
            model = teaching.make_student(teacher, self.student_layers, self.student_hidden)
            identity = loading.source
            trained = not loading.source.random_weights
        else:
            from workloads.models.loading import load_tokenizer, open_model

            identity = open_model(self.teacher)
            if load_tokenizer(identity).get_vocab() != tokenizer.get_vocab():
                raise BadConfiguration(
                    f"the vocabulary of {self.teacher} is not that of the student, so their "
                    "distributions are over different things"
                )
            teacher = task.function("load")(identity, **loading.model_arguments)
            teacher.to(loading.device.torch_device)
            trained = not identity.random_weights
        ours, theirs = model.config.vocab_size, teacher.config.vocab_size
        if ours != theirs:
            raise BadConfiguration(
                f"the teacher has a vocabulary of {theirs:,} tokens, the student one of {ours:,}"
            )
        teacher.eval().requires_grad_(False)
        self._taught.append(Taught(teacher=teacher, directory=Path(identity.path)))
        loading.details["teacher"] = f"{identity.entry.name}{'' if trained else ', random weights'}"
        return model

    def on_data(self, data: DataPlan) -> None:
        if self.teacher_logits != "kept" or not self._taught:
            return
        taught = self._taught[0]
        arrange, collate = data.arrange, data.collate

        def arranged(samples: Sequence[Any], size: int) -> list[list[int]]:
            taught.keep(samples, data, collate)
            return arrange(samples, size)

        def collated(samples: Sequence[Any]) -> Inputs:
            inputs = collate(samples)
            if taught.kept is not None and taught.kept.has(samples):
                positions = inputs.input_ids.shape[1]
                inputs.guide_values, inputs.guide_ids = taught.kept.of(samples, positions)
            return inputs

        data.arrange, data.collate = arranged, collated

    def on_model(self, training: Training) -> None:
        if not self._taught:
            return
        taught = self._taught[0]
        taught.training = training
        alpha = USUAL_ALPHA if self.distillation_alpha is None else self.distillation_alpha
        temperature = USUAL_TEMPERATURE if self.temperature is None else self.temperature

        def objective(inputs: Inputs, logits: torch.Tensor, kept: Any) -> torch.Tensor:
            divergence = taught.divergence(inputs, logits, kept, temperature)
            plain = training.plain_loss(inputs, logits, kept)
            return alpha * temperature**2 * divergence + (1 - alpha) * plain

        training.objective = objective
        training.details["distillation"] = f"alpha {alpha:g}, temperature {temperature:g}"
        for name, model in (("teacher", taught.teacher), ("student", training.model)):
            count = sum(parameter.numel() for parameter in model.parameters())
            training.metrics[f"{name}_parameters"] = float(count)
        training.held_out_metrics["held_out_kl"] = taught.plain_divergence

    def before_steps(
        self, training: Training, rehearse: Callable[[int], set[tuple[int, ...]]]
    ) -> None:
        if training.held_out_loss is None:
            return
        for taught in self._taught:  # not earlier: passes are then as they are in the steps
            if not training.first_step:  # else steps went before, in an earlier attempt
                found = training.held_out_loss(taught.plain_divergence)
                training.metrics["held_out_kl_before"] = found
            training.metrics["teacher_held_out_loss"] = training.held_out_loss(taught.own_loss)

    def after_step(self, training: Training, step: int) -> None:
        for taught in self._taught:
            taught.end_step()

    def after_steps(self, training: Training) -> None:
        for taught in self._taught:
            share = taught.share()
            if share is not None:
                training.metrics["teacher_share"] = share
            if taught.kept is not None:
                how = f"computed in {taught.kept.made_s:.3g} s" if taught.kept.made_s else "read"
                training.details["teacher_logits"] = (
                    f"{taught.kept.values.shape[1]} largest of {len(taught.kept.values):,} "
                    f"positions, {taught.kept.nbytes:,} bytes, {how}"
                )


SPECS = (Distillation,)
