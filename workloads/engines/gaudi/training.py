"""LoRA by optimum-habana's own trainer, ``GaudiTrainer``, on one Gaudi card.

The trainer runs the loop: lazy mode with a graph for each part of a step, the bridge's fused AdamW
and clipping, forward and backward pass overlapped. It is told of each step's begin and end, where
the card is waited for, and those steps are the row's samples. Every batch is padded to
``max_length``: another shape would be another graph.

The same job with the engine ``transformers`` runs Nightgrid's own loop on the card; that one knows
all techniques and several cards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from workloads import weights
from workloads.api import JobContext, MeasureSettings, Request, Result, Sample
from workloads.compilations import Compilations
from workloads.data.catalog import Dataset, load_dataset
from workloads.devices.monitoring.host_memory import HostMemoryPeak, resident_bytes
from workloads.engines.gaudi import generation, library
from workloads.engines.optimum_habana import SPEC
from workloads.errors import BadConfiguration
from workloads.finetuning_method import MethodParameters, method_for
from workloads.models.loading import load_tokenizer, open_model
from workloads.registry import task_for
from workloads.tasks.base import TaskSpec
from workloads.techniques.base import Inputs
from workloads.training import adapters, methods
from workloads.training.flops import train_flops_per_token
from workloads.training.samples import Encoded, Learnable, SampleFormat
from workloads.warmup import repeated_if_compiled

if TYPE_CHECKING:
    from workloads.devices.hpu import HpuDevice


def run(request: Request, context: JobContext) -> Result:
    """Fine-tune with ``GaudiTrainer``; see ``workloads.api.Workload``."""
    return repeated_if_compiled(lambda: _run(request, context), request, context)


def _run(request: Request, context: JobContext) -> Result:
    method = method_for(request.parameters, probe=request.probe)
    version = library.prepare(context.device)
    hpu: HpuDevice = context.device  # type: ignore[assignment]  # prepare() takes no other
    from optimum.habana import GaudiConfig, GaudiTrainer, GaudiTrainingArguments

    context.enter_phase("load")
    context.resident(f"{request.residency_key}|trained", lambda: None)  # others' models make room
    baseline = resident_bytes()
    began = context.clock()
    source = open_model(request.model, layout="original")
    task = task_for(request.workload, source.entry)
    tokenizer = load_tokenizer(source)
    model = generation.load_model(source, request, hpu)
    found = weights.inspect(model, request.precision, hpu.name, generation.ENGINE)
    hpu.seed(0)  # adapters start from random numbers
    applied = methods.apply(model, method, request.precision, hpu.name)
    applied.model.to(hpu.torch_device)
    load_s = context.clock() - began

    form = SampleFormat(
        tokenizer=tokenizer,
        source=source,
        config=model.config,
        parameters=request.parameters,
        pad_token_id=tokenizer.pad_token_id or 0,
        context_length=generation.context_length(model.config),
    )
    samples, dataset = _samples(request, method, task, form)
    collate = task.function("collate")
    rows = [_row(collate([sample], form, fixed=True)) for sample in samples]
    warmup = max(request.measure.warmup, SPEC.warmup_passes) if request.measure.warmup else 0
    steps = _Steps(context, request.measure, warmup, rows, request.batch_size)

    class Trainer(GaudiTrainer):  # type: ignore[misc]
        """Takes rows in order, and keeps each step's loss on the card."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(rows)  # type: ignore[arg-type]

        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*given, **named)
            steps.losses.append(loss.detach())
            return loss

    with tempfile.TemporaryDirectory() as directory, HostMemoryPeak() as host_memory:
        trainer = Trainer(
            model=applied.model,
            gaudi_config=GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True),
            args=GaudiTrainingArguments(
                output_dir=directory,
                use_habana=True,
                use_lazy_mode=hpu.lazy(),
                bf16=request.precision == "bf16",
                per_device_train_batch_size=request.batch_size,
                max_steps=warmup + method.steps,
                learning_rate=methods.learning_rate(method),
                lr_scheduler_type="constant",
                weight_decay=0.0,
                throughput_warmup_steps=warmup,
                pipelining_fwd_bwd=hpu.lazy(),
                adjust_throughput=True,
                dataloader_drop_last=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=rows,
            data_collator=_stack,
            callbacks=[steps],
        )
        first = _First(task, rows, samples, request.batch_size, hpu)
        before = first.loss(applied.model)
        hpu.release_memory()
        hpu.reset_peak_memory()
        context.enter_phase("warmup")
        trainer.train()
    after = first.loss(applied.model)
    details = {
        "learned": dataset.learned,
        "method": method.method,
        "trainer": "GaudiTrainer",
        "optimum_habana": version,
        "hpu_mode": "lazy" if hpu.lazy() else "eager",
        "learning_rate": f"{methods.learning_rate(method):g}",
        "architecture": type(model).__name__,
        "adapter": applied.adapter,
        "optimizer": "the bridge's fused AdamW, gradients clipped to a norm of 1",
        "host_memory_peak": host_memory.method,
        **steps.compiled(),
    }
    if not after < before:
        details["loss_flag"] = f"the loss on the first batch did not fall: {before:.6g} before"
    if method.save_adapter and not request.probe:
        origin = {"model": request.model, "method": method.method, "dataset": request.dataset}
        details["saved_adapter"] = str(
            adapters.save_adapter(applied.model, method.save_adapter, origin)
        )
    return Result(
        samples=steps.samples(),
        stop_reason="time_limit" if steps.cut else "max_repeats",
        load_s=load_s,
        **steps.warmth(),
        weight_bytes=found.weight_bytes,
        parameter_count=found.parameter_count,
        trainable_parameter_count=sum(
            p.numel() for p in applied.model.parameters() if p.requires_grad
        ),
        train_flops_per_token=train_flops_per_token(applied.model),
        baseline_host_memory_bytes=baseline,
        peak_host_memory_bytes=host_memory.bytes,
        peak_device_memory_bytes=hpu.peak_memory_bytes(),
        random_weights=source.random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=applied.detail,
        metrics={"first_batch_loss_before": before, "first_batch_loss_after": after},
        details=details,
    )


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Times each step and ends training when its time is up."""

    def __init__(
        self,
        context: JobContext,
        settings: MeasureSettings,
        warmup: int,
        rows: Sequence[dict[str, Any]],
        batch_size: int,
    ) -> None:
        self._context, self._settings = context, settings
        self._rows, self._batch_size = rows, batch_size
        self._times: list[tuple[float, float]] = []  # wall and CPU seconds of each step
        self._began = (0.0, 0.0)
        self._first = 0.0
        self._timed_from: float | None = None
        self._warmup = warmup
        self._warmup_cut = False
        self._compiled = Compilations()
        self.cut = False
        self.losses: list[torch.Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.device.synchronize()
        now = self._context.clock()
        self._first = self._first or now
        late = now - self._first > self._settings.warmup_limit_s
        if self._timed_from is None and (late or len(self._times) == self._warmup):
            self._context.enter_phase("measure")
            self._warmup_cut = len(self._times) < self._warmup
            self._warmup = len(self._times)
            self._compiled = self._context.device.compilations()
            self._timed_from = now
        self._began = (now, self._context.cpu_clock())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.device.synchronize()
        now, cpu = self._context.clock(), self._context.cpu_clock()
        self._times.append((now - self._began[0], cpu - self._began[1]))
        if self._timed_from is not None and now - self._timed_from > self._settings.time_limit_s:
            self.cut = state.global_step < state.max_steps
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._compiled = self._context.device.compilations().since(self._compiled)

    def warmth(self) -> dict[str, Any]:
        """The cost of warm-up, and what it left. All steps have one shape."""
        asked = bool(self._settings.warmup)
        return {
            "warmup_s": (self._timed_from or self._first) - self._first,
            "warmup_steps": self._warmup,
            "warmup_end": ("limit" if self._warmup_cut else "complete") if asked else None,
            "shapes": 1,
            "shapes_unmet": 0 if asked else None,
            "timed_parts": 1,
            "timed_compilations": self._compiled.graphs,
            "timed_cpu_fallbacks": self._compiled.cpu_fallbacks,
        }

    def compiled(self) -> dict[str, str]:
        """Details of what was compiled in the timed part, for the row."""
        told = self._compiled.told()
        return {"compiled_in_timed_part": told} if told else {}

    def samples(self) -> tuple[Sample, ...]:
        """One sample a step, warm-up included."""
        made = []
        batches = max(len(self._rows) // self._batch_size, 1)
        for step, (wall_s, cpu_s) in enumerate(self._times):
            start = step % batches * self._batch_size
            rows = self._rows[start : start + self._batch_size]
            real = sum(int(row["attention_mask"].sum()) for row in rows)
            made.append(
                Sample(
                    repeat=step,
                    batch=0,
                    warmup=step < self._warmup,
                    complete=True,
                    wall_s=wall_s,
                    cpu_s=cpu_s,
                    items=len(rows),
                    input_tokens=real,
                    output_tokens=0,
                    computed_tokens=sum(int(row["input_ids"].numel()) for row in rows),
                    loss=float(self.losses[step]) if step < len(self.losses) else None,
                )
            )
        return tuple(made)


def _samples(
    request: Request, method: MethodParameters, task: TaskSpec, form: SampleFormat
) -> tuple[Sequence[Learnable], Dataset]:
    """Whole batches of training samples, and their dataset."""

    if request.batch_size < 1:
        raise BadConfiguration(f"batch size {request.batch_size}; at least 1 is needed")
    count = max(method.samples // request.batch_size, 1) * request.batch_size
    dataset = load_dataset(request.dataset, method.reading())
    encoded: Encoded = task.function("encode")(dataset.examples, count, form)
    samples = encoded.samples
    if request.probe:  # the longest samples decide whether a batch fits
        samples = sorted(samples, key=lambda sample: -sample.tokens)[: request.batch_size]
    return samples, dataset


def _row(inputs: Inputs) -> dict[str, torch.Tensor]:
    """One sample as the trainer takes it: all tensors [length]."""
    return {name: tensor[0] for name, tensor in inputs.tensors().items()}


def _stack(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class _First:
    """The first batch, whose loss without training is told before and after."""

    def __init__(
        self,
        task: TaskSpec,
        rows: Sequence[dict[str, torch.Tensor]],
        samples: Sequence[Learnable],
        size: int,
        device: HpuDevice,
    ) -> None:
        self._loss = task.function("loss")
        self._batch = _stack(rows[:size])
        self._learned = sum(sample.learned_tokens for sample in samples[:size])
        self._device = device

    def loss(self, model: Any) -> float:
        """Mean loss of the labelled tokens. From the logits: some of the library's classes give
        their loss in bf16, in which a few steps change nothing."""
        model.eval()
        with torch.no_grad():
            on_card = {
                name: tensor.to(self._device.torch_device) for name, tensor in self._batch.items()
            }
            labels = on_card.pop("labels")
            logits = model(**on_card, return_dict=True).logits
            loss = float(self._loss(logits, labels, None) / self._learned)
        model.train()
        return loss
