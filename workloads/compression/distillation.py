"""Distillation: a student learns from a larger model.

A student with fewer layers copies every n-th layer of its teacher (DistilBERT); a narrower one has
fewer heads of equal size and new weights. The loss of a position is α·T²·KL(teacher ‖ student) +
(1 − α)·cross entropy in float32, KL at temperature T; T² offsets the gradients' scaling. The
teacher's largest logits of learned positions can be cached, so many epochs pay for them once.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.base import BadConfiguration, JobDescription, Metric, Refusal
from workloads.data.cache import cached_directory
from workloads.inspection.configuration import vocabulary_size
from workloads.models.catalog import checkpoint_kind, known_config
from workloads.settings import choice, work
from workloads.training.data import NOT_LEARNED
from workloads.training.methods import method_name
from workloads.training.technique import DataPlan, Inputs, Loading, Technique, Training

if TYPE_CHECKING:
    import torch

    from workloads.training.data import TrainingSample


#: Cached logits per position.
LARGEST = 64
_FORMAT = 1


def summed_kl(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL divergence of the student from the teacher, summed over labelled positions.

    Of a teacher's largest logits, both distributions are over the tokens that are kept: a student
    normalised over the whole vocabulary would be drawn away from all that the teacher left out.

    ``student`` is [positions, vocabulary]; ``teacher`` too, or its largest logits [positions,
    kept] with their ``ids``; ``labels`` [positions], -100 where nothing is learned.
    """
    import torch

    if ids is not None:
        student = student.gather(-1, ids)
    log_student = torch.log_softmax(student.float() / temperature, -1)
    log_teacher = torch.log_softmax(teacher.float() / temperature, -1)
    divergences = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
    return (divergences * (labels != NOT_LEARNED)).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLogits:
    """A teacher's largest logits at the learned positions of samples, on disk."""

    rows: dict[TrainingSample, tuple[int, int]]  # -> from row, count
    values: Any  # [rows, kept], float32, mapped
    ids: Any  # [rows, kept], int32, mapped
    made_s: float  # 0: they were there
    nbytes: int

    def of(self, samples: Sequence[TrainingSample], positions: int) -> tuple[Any, Any]:
        """Values and ids [samples, positions, kept] of padded samples; 0 elsewhere."""
        import torch

        shape = (len(samples), positions, self.values.shape[1])
        values = torch.zeros(shape)
        ids = torch.zeros(shape, dtype=torch.long)
        for row, sample in enumerate(samples):
            start, count = self.rows[sample]
            first = sample.prompt_tokens - 1  # predicts the first learned token
            rows, places = slice(start, start + count), slice(first, first + count)
            values[row, places] = torch.from_numpy(self.values[rows].copy())
            ids[row, places] = torch.from_numpy(self.ids[rows].astype("int64"))
        return values, ids


#: Divisor of a narrower student's inner channels.
_VECTOR = 8


def make_student(teacher: Any, layers: int | None, hidden: int | None) -> torch.nn.Module:
    """Make a student of so many layers and this width (None: as the teacher).

    Copied layers must exist, and the head size must divide the width.
    """
    config = copy.deepcopy(teacher.config)
    there = int(config.num_hidden_layers)
    wanted = layers or there
    if hidden is None and wanted > there:
        raise BadConfiguration(f"student_layers {wanted}: the teacher has {there} to copy")
    kept = [index * there // wanted for index in range(wanted)]  # evenly spaced
    config.num_hidden_layers = wanted
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index % there] for index in kept]
    if hidden is not None:
        _narrow(config, hidden)
    student = type(teacher)(config).to(teacher.dtype).to(teacher.device)
    if getattr(teacher, "generation_config", None) is not None:
        # It has the end tokens; a new model's is made from its config.
        student.generation_config = copy.deepcopy(teacher.generation_config)
    if hidden is None:
        student.load_state_dict(_renumbered(teacher, kept))
        student.tie_weights()
    return student  # type: ignore[no-any-return]


def head_size(config: Any) -> int:
    """Channels of one attention head."""
    return int(getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads)


def _narrow(config: Any, hidden: int) -> None:
    size = head_size(config)
    if hidden % size:
        raise BadConfiguration(
            f"student_hidden {hidden}: the teacher's heads have {size} channels, which do not "
            f"divide it; {hidden // size * size or size} would do"
        )
    heads = hidden // size
    inner = config.intermediate_size * hidden / config.hidden_size
    config.intermediate_size = max(_VECTOR, round(inner / _VECTOR) * _VECTOR)
    config.hidden_size, config.num_attention_heads = hidden, heads
    config.head_dim = size
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = math.gcd(config.num_key_value_heads, heads)


def _renumbered(teacher: Any, kept: list[int]) -> dict[str, torch.Tensor]:
    """Tensors of the teacher's copied layers under the student's names."""
    import torch

    count = teacher.config.num_hidden_layers
    lists = (
        name
        for name, module in teacher.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    )
    prefix = next(lists, "")
    layer = re.compile(rf"{re.escape(prefix)}\.(\d+)\.(.+)")
    state = {}
    for name, tensor in teacher.state_dict().items():
        match = layer.fullmatch(name)
        if match is None:
            state[name] = tensor
        elif int(match[1]) in kept:
            state[f"{prefix}.{kept.index(int(match[1]))}.{match[2]}"] = tensor
    return state


@dataclass(slots=True, kw_only=True)
class Taught:
    """A teacher, its cached logits and its timing."""

    teacher: Any
    directory: Path
    training: Any = None  # from ``on_model`` on
    kept: KeptLogits | None = None
    stamps: list[tuple[Any, Any]] = field(default_factory=list)  # of this step
    counted: list[tuple[Any, Any]] = field(default_factory=list)  # of all steps but the first
    ends: list[Any] = field(default_factory=list)

    def logits(self, inputs: Inputs, positions: Any) -> torch.Tensor:
        """The teacher's logits, without gradients."""
        import torch

        device = self.training.device
        began = device.stamp()
        with torch.no_grad():
            logits = self.training.logits(self.teacher, inputs, positions)
        device.mark_step()
        if torch.is_grad_enabled():
            self.stamps.append((began, device.stamp()))
        return logits  # type: ignore[no-any-return]

    def divergence(
        self,
        inputs: Inputs,
        logits: torch.Tensor,
        positions: Any,
        temperature: float = 1.0,
        guided: bool = False,
    ) -> torch.Tensor:
        """Summed KL divergence from the teacher's full distribution; ``guided``: from its cached
        logits if the batch has them."""
        aligned = self.training.task.function("aligned")
        student, labels = aligned(logits, inputs.labels, positions)
        values, ids = inputs.guide_values, inputs.guide_ids
        if not guided or values is None or ids is None:
            teacher, _ = aligned(self.logits(inputs, positions), inputs.labels, positions)
            return summed_kl(student, teacher, labels, temperature)
        if positions is not None:
            values, ids = values[:, positions], ids[:, positions]
        values, ids = (aligned(guide, inputs.labels, positions)[0] for guide in (values, ids))
        return summed_kl(student, values, labels, temperature, ids)

    def keep(self, samples: Sequence[TrainingSample], data: DataPlan, collate: Any) -> None:
        """Read the largest logits of these samples from the node's cache, else compute them."""
        import numpy as np
        import torch

        from workloads.util.contents import fingerprint

        unique = list(dict.fromkeys(samples))
        teacher = f"{fingerprint(self.directory)} {self.arithmetic()}"
        digest = hashlib.sha256(f"{_FORMAT}\n{LARGEST}\n{teacher}\n".encode())
        rows, start = {}, 0
        for sample in unique:
            rows[sample] = (start, sample.learned_tokens)
            start += sample.learned_tokens
            digest.update(repr((sample.prompt_tokens, *sample.ids)).encode())
        made_s = 0.0

        def build(directory: Path) -> None:
            nonlocal made_s
            began = time.perf_counter()
            arrays: tuple[list[Any], list[Any]] = ([], [])
            for first in range(0, len(unique), data.batch_size):
                some = unique[first : first + data.batch_size]
                inputs = data.move(collate(some))
                with torch.no_grad():
                    logits = self.training.logits(self.teacher, inputs, None).float()
                values, ids = logits.topk(min(LARGEST, logits.shape[-1]), dim=-1)
                values, ids = values.cpu().numpy(), ids.cpu().numpy().astype("int32")
                for row, sample in enumerate(some):
                    place = slice(sample.prompt_tokens - 1, len(sample.ids) - 1)
                    arrays[0].append(values[row, place])
                    arrays[1].append(ids[row, place])
            for name, parts in zip(("values", "ids"), arrays, strict=True):
                np.save(directory / f"{name}.npy", np.concatenate(parts))
            made_s = time.perf_counter() - began

        directory = cached_directory(f"teacher-logits-{digest.hexdigest()[:24]}", build)
        files = [directory / "values.npy", directory / "ids.npy"]
        values, ids = (np.load(file, mmap_mode="r") for file in files)
        nbytes = sum(file.stat().st_size for file in files)
        self.kept = KeptLogits(rows=rows, values=values, ids=ids, made_s=made_s, nbytes=nbytes)

    def arithmetic(self) -> str:
        """Key of everything besides weights and samples that affects the logits."""
        import torch

        kind = self.training.device.spec.torch_type
        with self.training.in_forward():
            mixed = torch.is_autocast_enabled(kind)
            autocast = str(torch.get_autocast_dtype(kind)) if mixed else "none"
        attention = getattr(self.teacher.config, "_attn_implementation", None)
        # oneDNN in fp32 uses the switch for bf16 products.
        by_onednn = "matmul_backend" in self.training.details
        products = "onednn" if by_onednn else torch.get_float32_matmul_precision()
        return f"{self.teacher.dtype} {autocast} {attention} {products} {kind}"


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
        *(
            Metric(
                name=f"{model}_parameters",
                title=model,
                unit="parameters",
                description=f"Parameters of the {model}.",
            )
            for model in ("teacher", "student")
        ),
    )

    teacher: str | None = work(
        None,
        loads=True,
        consumes="model",
        min_length=1,
        description="The model that teaches, where the student (`model`) is a checkpoint of its "
        "own (method distill). Left out: `model` teaches a student that is made from it.",
    )
    student_layers: int | None = work(
        None,
        loads=True,
        ge=1,
        description="Layers of the student that is made from the model: every n-th of its layers, "
        "copied (new ones with student_hidden).",
    )
    student_hidden: int | None = work(
        None,
        loads=True,
        ge=1,
        description="Width (hidden size) of the student, whose weights are then new.",
    )
    distillation_alpha: float | None = work(
        None,
        ge=0,
        le=1,
        description="Part α of the loss that comes from the teacher. Left out: 0.5.",
    )
    temperature: float | None = work(
        None,
        gt=0,
        le=100,
        description="Temperature T of both distributions. Left out: 2.",
    )
    teacher_logits: Literal["computed", "kept"] | None = choice(
        None,
        description="computed asks the teacher in every step; kept writes its 64 largest logits of "
        "each learned position into the node's cache, once, and reads them from there. Left out: "
        "computed.",
    )

    _taught: Taught  # the teacher of the model that this job trains, once loaded

    def declared_refusals(self, job: JobDescription) -> Iterator[Refusal]:
        yield from super().declared_refusals(job)
        # Here, since the method alone does not make this technique act.
        there = self.teacher or self.student_layers or self.student_hidden
        if method_name(job.parameters) == _METHOD and not there:
            yield Refusal(
                setting="method",
                reason="the teacher would be the student: nothing says how they differ",
                hint="name a teacher, or set student_layers or student_hidden",
            )

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        if method_name(job.parameters) != _METHOD:
            return
        sizes = ("student_layers", "student_hidden")
        made = [name for name in sizes if getattr(self, name) is not None]
        if self.teacher == job.model:
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
        yield from self._together(job, made)

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
        copied = self.student_layers if not self.student_hidden else None
        if copied and isinstance(there, int) and copied >= there:
            yield Refusal(
                setting="student_layers",
                reason=f"{job.model} has {there} layers"
                + (": the student would be its teacher" if copied == there else " to copy"),
                hint=f"write fewer than {there}, or set student_hidden for new weights",
            )
        size = config.get("head_dim")
        if self.student_hidden and isinstance(size, int) and self.student_hidden % size:
            yield Refusal(
                setting="student_hidden",
                reason=f"the heads of {job.model} have {size} channels, which do not divide "
                f"{self.student_hidden}",
                hint=f"write a multiple of {size}",
            )

    def _together(self, job: JobDescription, made: Sequence[str]) -> Iterator[Refusal]:
        kind = checkpoint_kind(job.model)
        pairs = kind is not None and kind.encoder_decoder
        if pairs and made:
            yield Refusal(
                setting=made[0],
                reason="this version makes students of models that are one decoder",
                hint="name a student checkpoint as model, and the teacher",
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

    def before_load(self, loading: Loading) -> None:
        loading.changes.append(
            lambda model, tokenizer, task: self._meet(model, tokenizer, task, loading)
        )

    def _meet(self, model: Any, tokenizer: Any, task: Any, loading: Loading) -> Any:
        if self.teacher is None:
            source, teacher = loading.source, model
            model = make_student(teacher, self.student_layers, self.student_hidden)
        else:
            from workloads.models.loading import load_tokenizer, open_model

            source = open_model(self.teacher)
            if load_tokenizer(source).get_vocab() != tokenizer.get_vocab():
                raise BadConfiguration(
                    f"the vocabulary of {self.teacher} is not that of the student, so their "
                    "distributions are over different things"
                )
            teacher = task.function("load")(source, **loading.model_arguments)
            teacher.to(loading.device.torch_device)
        ours, theirs = model.config.vocab_size, teacher.config.vocab_size
        if ours != theirs:
            raise BadConfiguration(
                f"the teacher has a vocabulary of {theirs:,} tokens, the student one of {ours:,}"
            )
        teacher.eval().requires_grad_(False)
        self._taught = Taught(teacher=teacher, directory=Path(source.path))
        random = ", random weights" if source.random_weights else ""
        loading.details["teacher"] = f"{source.entry.name}{random}"
        return model

    def on_data(self, data: DataPlan) -> None:
        if self.teacher_logits != "kept":
            return
        taught = self._taught
        arrange, collate = data.arrange, data.collate

        def arranged(samples: Sequence[Any], size: int) -> list[list[int]]:
            taught.keep(samples, data, collate)
            return arrange(samples, size)

        def collated(samples: Sequence[Any]) -> Inputs:
            inputs = collate(samples)
            kept = taught.kept
            # Held-out samples are not cached.
            if kept is not None and all(sample in kept.rows for sample in samples):
                positions = inputs.input_ids.shape[1]
                inputs.guide_values, inputs.guide_ids = kept.of(samples, positions)
            return inputs

        data.arrange, data.collate = arranged, collated

    def on_model(self, training: Training) -> None:
        taught = self._taught
        taught.training = training
        alpha = USUAL_ALPHA if self.distillation_alpha is None else self.distillation_alpha
        temperature = USUAL_TEMPERATURE if self.temperature is None else self.temperature

        def objective(inputs: Inputs, logits: torch.Tensor, kept: Any) -> torch.Tensor:
            divergence = taught.divergence(inputs, logits, kept, temperature, guided=True)
            plain = training.plain_loss(inputs, logits, kept)
            return alpha * temperature**2 * divergence + (1 - alpha) * plain

        training.objective = objective
        training.details["distillation"] = f"alpha {alpha:g}, temperature {temperature:g}"
        for name, model in (("teacher", taught.teacher), ("student", training.model)):
            count = sum(parameter.numel() for parameter in model.parameters())
            training.metrics[f"{name}_parameters"] = float(count)
        training.held_out_metrics["held_out_kl"] = taught.divergence

    def before_steps(
        self, training: Training, rehearse: Callable[[int], set[tuple[int, ...]]]
    ) -> None:
        taught = self._taught
        if training.held_out_loss is None:
            return

        def of_teacher(inputs: Inputs, _: torch.Tensor, positions: Any) -> torch.Tensor:
            return training.plain_loss(inputs, taught.logits(inputs, positions), positions)

        # Not earlier: passes are now as they are in the steps.
        if not training.first_step:  # not resumed
            training.metrics["held_out_kl_before"] = training.held_out_loss(taught.divergence)
        training.metrics["teacher_held_out_loss"] = training.held_out_loss(of_teacher)

    def after_step(self, training: Training, step: int) -> None:
        taught = self._taught
        if taught.ends:  # the first step's beginning is unknown
            taught.counted += taught.stamps
        taught.stamps.clear()
        taught.ends.append(training.device.stamp())

    def after_steps(self, training: Training) -> None:
        taught = self._taught
        device, ends = training.device, taught.ends
        device.synchronize()
        whole = device.seconds_in([(ends[0], ends[-1])] if len(ends) > 1 else [])
        own = device.seconds_in(taught.counted)
        if whole and own is not None:
            training.metrics["teacher_share"] = own / whole
        if (kept := taught.kept) is not None:
            how = f"computed in {kept.made_s:.3g} s" if kept.made_s else "read"
            training.details["teacher_logits"] = (
                f"{kept.values.shape[1]} largest of {len(kept.values):,} positions, "
                f"{kept.nbytes:,} bytes, {how}"
            )


SPECS = (Distillation,)
