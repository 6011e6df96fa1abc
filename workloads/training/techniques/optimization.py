"""Techniques of the update, what it trains, and the memory that it takes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.base import (
    BadConfiguration,
    JobDescription,
    Refusal,
    Unsupported,
    require_package,
)
from workloads.settings import choice_in_id, work, work_in_id
from workloads.training.methods import WHOLE_METHODS
from workloads.training.technique import DataPlan, Technique, Training

if TYPE_CHECKING:
    import torch

#: Packages of optimizers that torch lacks.
PACKAGES = {
    "adamw-8bit": "bitsandbytes",
    "adamw-8bit-paged": "bitsandbytes",
    "adamw-8bit-torchao": "torchao",
}


class OptimizerChoice(Technique):
    """The optimizer: the rule that turns gradients into changes, and its memory of each weight.

    AdamW keeps two averages per trained weight, in 32 bits twice the bytes of the weights
    themselves. Fused, it makes one pass over memory where the plain one makes several. The 8-bit
    kinds keep the averages in blocks of 8-bit numbers; small tensors stay in 32 bits, and so do
    embeddings, whose rows learn rarely and by unlike amounts. The paged one moves averages to the
    host when a card runs full. Adafactor keeps a row and a column of averages for each matrix.
    """

    name: ClassVar[str] = "optimizers"
    title: ClassVar[str] = "optimizer"
    order: ClassVar[int] = 110
    always: ClassVar[bool] = True
    capabilities: ClassVar[Any] = {
        ("optimizer", "adamw-8bit"): "optimizers_8bit",
        ("optimizer", "adamw-8bit-torchao"): "optimizers_8bit",
        ("optimizer", "adamw-8bit-paged"): "paged_memory",
        ("optimizer", "adamw-fused"): "fused_optimizer",
    }

    optimizer: Literal[
        "adamw", "adamw-fused", "adamw-8bit", "adamw-8bit-paged", "adamw-8bit-torchao", "adafactor"
    ] = choice_in_id(
        "adamw",
        description="adamw is PyTorch's, adamw-fused its one-pass kernel (on Gaudi: Habana's, "
        "whose epsilon is 1e-6, as in optimum-habana's trainer, where PyTorch has 1e-8), "
        "adamw-8bit and adamw-8bit-paged are bitsandbytes', adamw-8bit-torchao torchao's. No "
        "weight decay, constant learning rate.",
    )

    def on_model(self, training: Training) -> None:
        if package := PACKAGES.get(self.optimizer):
            require_package(package, f"optimizer {self.optimizer}", "torchao bitsandbytes")
        training.make_optimizer = partial(_make, self.optimizer, training)


def _make(name: str, training: Training, parameters: Sequence[torch.nn.Parameter]) -> Any:
    import torch

    settings: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": 0.0}
    if name == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    if name == "adamw-fused":
        return training.device.fused_adamw(parameters, **settings)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, **settings)
    tables = [m for m in training.model.modules() if isinstance(m, torch.nn.Embedding)]
    embeddings = {id(table.weight) for table in tables if table.weight.requires_grad}
    training.details["averages_in_32_bits"] = f"{len(embeddings)} embeddings, small tensors"
    if name == "adamw-8bit-torchao":
        from torchao.optim import AdamW8bit

        return _by_torchao(AdamW8bit, embeddings)(parameters, **settings)
    import bitsandbytes

    paged = bitsandbytes.optim.PagedAdamW8bit if "paged" in name else bitsandbytes.optim.AdamW8bit
    return _by_bitsandbytes(paged, embeddings)(parameters, **settings)


def _by_bitsandbytes(kind: Any, embeddings: set[int]) -> Any:
    """Give embeddings 32-bit averages, without bitsandbytes' process-wide register."""

    class Optimizer(kind):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: Any) -> Any:
            config = super().get_config(gindex, pindex, group)
            whole = id(group["params"][pindex]) in embeddings
            return config | {"optim_bits": 32} if whole else config

    return Optimizer


def _by_torchao(kind: Any, embeddings: set[int]) -> Any:
    """Give embeddings, and averages left in the weights' format, 32 bits."""
    import torch

    class Optimizer(kind):  # type: ignore[misc]
        def _new_buffer(self, p: Any, signed: bool) -> Any:
            if id(p) in embeddings:
                return torch.zeros_like(p, dtype=torch.float32)
            made = super()._new_buffer(p, signed)
            part = made.to_local() if hasattr(made, "to_local") else made
            return made.float() if type(part) is torch.Tensor else made

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)  # torch casts averages to their weights' format
            groups = zip(state_dict["param_groups"], self.param_groups, strict=True)
            for saved, own in groups:
                for number, p in zip(saved["params"], own["params"], strict=True):
                    for name, value in state_dict["state"].get(number, {}).items():
                        if getattr(value, "dtype", None) == torch.float32 and name != "step":
                            self.state[p][name] = value.to(p.device)

    return Optimizer


class GradientClipping(Technique):
    """Gradient clipping: no step goes further than the usual ones.

    Now and then a batch has gradients far beyond those of others, and one step in their direction
    undoes many. Clipping scales all gradients down together where the root of the sum of their
    squares is above a limit. transformers' Trainer does so at 1 unless told, and Habana's examples
    of DeepSpeed do; here nothing is clipped unless a job says so, whatever the strategy.
    """

    name: ClassVar[str] = "clipping"
    title: ClassVar[str] = "gradient clipping"
    order: ClassVar[int] = 112

    max_gradient_norm: float | None = work(
        None,
        gt=0,
        description="Scale gradients down where their norm, of all weights together, is above "
        "this. Left out: nothing is clipped.",
    )

    def on_model(self, training: Training) -> None:
        norm = training.max_gradient_norm = self.max_gradient_norm
        assert norm is not None
        import torch

        learning: list[torch.nn.Parameter] = []

        def clip() -> None:
            if not learning:  # what the cards have left of the model
                learning.extend(training.trainable())
            if training.layout.model_parallel > 1:
                from workloads.training.parallel import tensor as split

                split.clip(training.model, learning, norm, training.pipeline)
            else:
                torch.nn.utils.clip_grad_norm_(learning, norm)

        training.before_update.append(clip)  # DeepSpeed clips by itself
        training.details["max_gradient_norm"] = f"{norm:g}"


class Schedule(Technique):
    """Learning-rate schedule: large steps first, small ones at the end.

    With *linear* the rate falls from step to step on a straight line that would reach 0 after the
    last one, which is what transformers' Trainer does unless told. A measured job has few steps of
    a long training: ``schedule_steps`` says how long the whole would be, so that its rates are
    those of the beginning.
    """

    name: ClassVar[str] = "schedule"
    title: ClassVar[str] = "learning-rate schedule"
    beside: ClassVar[Any] = {"schedule_steps": ("learning_rate_schedule", ("linear",))}
    order: ClassVar[int] = 135  # sets the rate of the optimizer that the strategy has made

    learning_rate_schedule: Literal["constant", "linear"] = work(
        "constant",
        description="constant keeps learning_rate; linear lets it fall on a straight line to 0 "
        "after the last step.",
    )
    schedule_steps: int | None = work(
        None,
        ge=1,
        description="For linear: after how many steps the rate is 0. Left out: after those of the "
        "job, warm-up included.",
    )

    def on_model(self, training: Training) -> None:
        steps = self.schedule_steps or training.steps
        training.details["learning_rate_schedule"] = f"linear to 0 after {steps} steps"

    def after_step(self, training: Training, step: int) -> None:
        steps = self.schedule_steps or training.steps
        rate = training.learning_rate * max(1 - (step + 1) / steps, 0.0)
        for group in training.optimizer.param_groups:
            group["lr"] = rate


class GradientAccumulation(Technique):
    """Gradient accumulation: a batch that does not fit, in several passes.

    The batch of an optimizer step is cut into micro-batches whose gradients are added up. Memory
    for activations falls with their number, and short samples are padded less, since they meet
    fewer long ones. The loss is divided by the tokens of the whole batch, so nothing else changes.
    """

    name: ClassVar[str] = "accumulation"
    title: ClassVar[str] = "gradient accumulation"
    order: ClassVar[int] = 40

    gradient_accumulation: int = choice_in_id(
        1,
        ge=1,
        description="Into how many micro-batches the batch of an optimizer step is cut. batch_size "
        "stays the samples per card and optimizer step, so this changes memory, not the training.",
    )

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        parts = self.gradient_accumulation
        if not isinstance(job.batch_size, int):
            yield Refusal(
                setting="gradient_accumulation",
                reason=f"batch_size {job.batch_size} looks for what fits in one pass",
                hint="write the batch size as a number, or gradient_accumulation: 1",
            )
        elif job.batch_size % parts:
            divisors = [n for n in range(1, job.batch_size + 1) if job.batch_size % n == 0]
            yield Refusal(
                setting="gradient_accumulation",
                reason=f"a batch of {job.batch_size} cannot be cut into {parts} equal parts",
                hint=f"it can be cut into {', '.join(map(str, divisors[:20]))}",
            )

    def on_data(self, data: DataPlan) -> None:
        data.micro_batches = self.gradient_accumulation


class GradientCheckpointing(Technique):
    """Gradient checkpointing: memory for time.

    The backward pass needs what every layer computed on the way forward. With checkpointing only
    the inputs of layers are kept, and each layer runs forward once more when its turn comes: about
    a third more arithmetic, and memory for activations that hardly grows with depth. Gradients are
    the same.
    """

    name: ClassVar[str] = "checkpointing"
    title: ClassVar[str] = "gradient checkpointing"
    order: ClassVar[int] = 60

    gradient_checkpointing: bool = choice_in_id(
        False,
        description="Keep only the inputs of layers on the way forward, and compute the rest "
        "again on the way back: less memory, about a third more arithmetic.",
    )

    def on_model(self, training: Training) -> None:
        model = training.model
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise Unsupported(f"{type(model).__name__} has no gradient checkpointing")
        # The other kind (reentrant) drops the gradients of adapters below a frozen embedding.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


class Freezing(Technique):
    """Freezing: train only the upper part of a model.

    Lower layers and embeddings change least in fine-tuning. Frozen, they need no gradients and no
    optimizer state, and the backward pass stops above them, which saves their share of its
    arithmetic. Adapters leave the whole model frozen anyway, so this belongs to methods that train
    all of it.
    """

    name: ClassVar[str] = "freezing"
    title: ClassVar[str] = "freezing"
    order: ClassVar[int] = 50
    beside: ClassVar[Any] = dict.fromkeys(
        ("freeze_embeddings", "freeze_layers"), ("method", (None, *WHOLE_METHODS))
    )

    freeze_embeddings: bool = work_in_id(
        False,
        description="Leave the embeddings as they are (methods full and qat), learned positions "
        "and T5's position biases among them; the row says how many.",
    )
    freeze_layers: int = work_in_id(
        0,
        ge=0,
        description="Leave the first so many layers as they are (methods full and qat); of the "
        "encoder, where the model has one.",
    )

    def on_model(self, training: Training) -> None:
        import torch

        model = training.model
        if self.freeze_embeddings:
            frozen = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Embedding)]
            for name in frozen:
                model.get_submodule(name).requires_grad_(False)
            names = Counter(name.rpartition(".")[2] for name in frozen)
            training.details["frozen_embeddings"] = ", ".join(
                f"{count} {name}" for name, count in names.items()
            )
        if self.freeze_layers:
            below = model
            if getattr(model.config, "is_encoder_decoder", False):
                below = model.get_encoder()
            lists = [[*m] for m in below.modules() if isinstance(m, torch.nn.ModuleList)]
            if not lists:
                raise BadConfiguration(f"{type(model).__name__} has no list of layers to freeze")
            layers = max(lists, key=len)
            if self.freeze_layers >= len(layers):
                raise BadConfiguration(
                    f"freeze_layers is {self.freeze_layers}; the model has {len(layers)} layers, "
                    "and one at least has to learn"
                )
            for layer in layers[: self.freeze_layers]:
                layer.requires_grad_(False)


class MemoryRelease(Technique):
    """Releasing memory between steps: order for time.

    Allocators keep what a step has freed, for the next one. Where steps differ in length, blocks of
    one step do not fit the next, and the kept memory grows until a card is full of holes. Giving it
    all back after a step costs the time of asking for it again; where memory is tight that can be
    the difference between running and not.
    """

    name: ClassVar[str] = "memory-release"
    title: ClassVar[str] = "memory release between steps"
    order: ClassVar[int] = 160

    release_memory_every: int = choice_in_id(
        0,
        ge=0,
        description="Give memory that is not in use back to the device (on CPUs to the system) "
        "after every so many optimizer steps, within their time; 0: never.",
    )

    _releases: int = 0
    _seconds: float = 0.0

    def after_step(self, training: Training, step: int) -> None:
        if (step + 1) % self.release_memory_every:
            return
        began = time.perf_counter()
        training.device.release_memory()
        self._seconds += time.perf_counter() - began
        self._releases += 1

    def after_steps(self, training: Training) -> None:
        training.details["memory_releases"] = str(self._releases)
        training.details["memory_release_s"] = f"{self._seconds:.6g}"


SPECS = (
    OptimizerChoice,
    GradientClipping,
    Schedule,
    GradientAccumulation,
    GradientCheckpointing,
    Freezing,
    MemoryRelease,
)
