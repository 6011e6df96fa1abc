"""Training by optimum-habana's own trainers, ``GaudiTrainer`` and ``GaudiSeq2SeqTrainer``.

Lazy mode, the bridge's fused AdamW and clipping, overlapped forward and backward passes; DDP on
several cards. Callbacks synchronize at each step's begin and end, and steps are the row's samples.
Every batch is padded to the most tokens, since each shape is another graph. Losses are means over
each card's labelled tokens. The engine ``transformers`` has all methods, techniques and ZeRO.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.data import default_collate
from transformers import TrainerCallback

from workloads.base import (
    BadConfiguration,
    JobContext,
    MeasureSettings,
    Request,
    Result,
    Unsupported,
    whole_sample,
)
from workloads.bench.measure import Measured
from workloads.bench.warmup import Warmth, repeated_if_compiled
from workloads.devices.base import Compilations
from workloads.devices.hpu import HpuDevice
from workloads.devices.monitor.host import HostMemoryPeak, resident_bytes
from workloads.engines.optimum_habana import SPEC, generation, mode_of, prepare
from workloads.models import precision as precisions
from workloads.models.catalog import positions_of
from workloads.models.loading import load_tokenizer, open_model, with_new_weights
from workloads.models.products import origin_by
from workloads.registry import task_for
from workloads.training import methods, saved_adapters
from workloads.training.data import Learnable, SampleFormat, read_samples
from workloads.training.losses import loss_details
from workloads.training.methods import method_of
from workloads.training.parallel.layout import Layout
from workloads.training.step import flops_per_token, plan_data
from workloads.training.technique import DataPlan, Inputs
from workloads.util.processes import variables

Row = dict[str, torch.Tensor]  # of one sample, each [positions]


class Rows(torch.utils.data.Dataset[Row]):
    """Rows of all steps and cards, all of one shape."""

    def __init__(self, data: DataPlan, samples: Sequence[Learnable], steps: int) -> None:
        self._data, self._steps = data, steps
        self._at_once = data.batch_size * data.cards
        self._batches = data.arrange(samples, self._at_once)
        self._collate = data.task.function("collate")

        def draw(step: int) -> Sequence[Learnable]:
            batch = self._batches[step % len(self._batches)]
            return data.draw([samples[index] for index in batch], step)

        self._drawn = lru_cache(maxsize=2)(draw)  # a step is read row by row

    def __len__(self) -> int:
        return self._steps * self._at_once

    def __getitem__(self, place: int) -> Row:
        step, position = divmod(place, self._at_once)
        sample = self._drawn(step)[position]
        inputs: Inputs = self._collate([sample], self._data.form, fixed=True)
        return {name: tensor[0] for name, tensor in inputs.tensors().items()}

    def of(self, step: int, rank: int) -> Sequence[Learnable]:
        """A card's samples of a step."""
        first = rank * self._data.batch_size
        return self._drawn(step)[first : first + self._data.batch_size]

    def batch(self, step: int, rank: int) -> Row:
        """A card's tensors of a step, each [rows, positions]."""
        first = step * self._at_once + rank * self._data.batch_size
        places = range(first, first + self._data.batch_size)
        whole: Row = default_collate([self[place] for place in places])
        return whole


class Steps(TrainerCallback):  # type: ignore[misc]
    """Times each step and stops training at the time limit; cards decide together."""

    def __init__(
        self, context: JobContext, settings: MeasureSettings, warmup: int, rows: Rows
    ) -> None:
        self._context, self._settings, self._rows = context, settings, rows
        self._times: list[tuple[float, float]] = []  # wall and CPU seconds of each step
        self._began = (0.0, 0.0)
        self._first = 0.0
        self._timed_from: float | None = None
        self._warmup = warmup
        self._warmup_cut = False
        self._compiled = Compilations()
        self._cut = False
        self.losses: list[torch.Tensor] = []

    def _any(self, mine: bool) -> bool:
        return any(self._context.collective.gather(mine))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.device.synchronize()
        now = self._context.clock()
        self._first = self._first or now
        late = self._any(now - self._first > self._settings.warmup_limit_s)
        if self._timed_from is None and (late or len(self._times) == self._warmup):
            self._context.enter_phase("measure")
            self._warmup_cut = len(self._times) < self._warmup
            self._warmup = len(self._times)
            self._compiled = self._context.device.compilations()
            self._timed_from = self._context.clock()
        self._began = (self._context.clock(), self._context.cpu_clock())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._context.device.synchronize()
        now, cpu = self._context.clock(), self._context.cpu_clock()
        self._times.append((now - self._began[0], cpu - self._began[1]))
        began = self._timed_from
        if self._any(began is not None and now - began > self._settings.time_limit_s):
            self._cut = state.global_step < state.max_steps
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._compiled = self._context.device.compilations().since(self._compiled)

    def measured(self) -> Measured:
        """All steps, warm-up included, one sample each."""
        warmed_up = bool(self._settings.warmup)
        end = "limit" if self._warmup_cut else "complete"
        row = self._rows[0]
        # Count the decoder's positions too.
        sides = [row[name] for name in ("input_ids", "decoder_input_ids") if name in row]
        positions = sum(int(side.numel()) for side in sides)
        made = []
        for step, (wall_s, cpu_s) in enumerate(self._times):
            mine = self._rows.of(step, self._context.rank)
            sample = whole_sample(
                repeat=step,
                warmup=step < self._warmup,
                wall_s=wall_s,
                cpu_s=cpu_s,
                items=len(mine),
                input_tokens=sum(sample.tokens for sample in mine),
                computed_tokens=positions * len(mine),
                loss=float(self.losses[step]) if step < len(self.losses) else None,
            )
            made.append(sample)
        return Measured(
            samples=tuple(made),
            stop_reason="time_limit" if self._cut else "max_repeats",
            compilations=self._compiled,
            warmth=Warmth(
                warmup_s=(self._timed_from or self._first) - self._first,
                warmup_steps=self._warmup,
                warmup_end=end if warmed_up else None,  # type: ignore[arg-type]
                shapes=1,
                shapes_unmet=0 if warmed_up else None,
                timed_compilations=self._compiled.graphs,
                timed_cpu_fallbacks=self._compiled.cpu_fallbacks,
            ),
        )


def first_loss(model: Any, data: DataPlan, rows: Rows, rank: int) -> float:
    """Mean loss of a card's first batch in evaluation mode, from logits: some of the library's
    classes return losses in bf16, too coarse to show a few steps."""
    model.eval()
    with torch.no_grad():
        batch = {name: t.to(data.device.torch_device) for name, t in rows.batch(0, rank).items()}
        labels = batch.pop("labels")
        logits = model(**batch, return_dict=True).logits
        learned = max(sum(sample.learned_tokens for sample in rows.of(0, rank)), 1)
        loss = float(data.task.function("loss")(logits, labels, None) / learned)
    model.train()
    return loss


def run(request: Request, context: JobContext) -> Result:
    """Train with the library's trainer; see ``workloads.base.Workload``."""
    return repeated_if_compiled(lambda: _run(request, context), request, context)


def _run(request: Request, context: JobContext) -> Result:
    method = method_of(request.parameters, probe=request.probe)
    version = prepare(context.device)
    hpu: HpuDevice = context.device  # type: ignore[assignment]  # prepare() takes no other
    mode = mode_of(request, hpu)
    import optimum.habana as gaudi

    context.enter_phase("load")
    context.resident(f"{request.residency_key}|trained", lambda: None)  # evict other models
    baseline = resident_bytes()
    began = context.clock()
    fresh = request.parameters.get("initial_weights") == "fresh"
    source = open_model(request.model, layout="original", weights=not fresh)
    task = task_for(request.workload, source.entry)
    tokenizer = load_tokenizer(source)
    if fresh:
        dtype = precisions.compute_dtype(request.precision)
        model = task.function("make")(source, len(tokenizer), torch_dtype=dtype)
    else:
        model = generation.load_model(source, request, hpu)
    new = getattr(model, "new_weights", ())
    weights = precisions.inspect(model, request.precision, hpu.name, generation.ENGINE)
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
        context_length=positions_of(model.config.to_dict()),
    )
    cards, rank = context.world_size, context.rank
    layout = Layout(rank=rank, world_size=cards)
    at_once = request.batch_size * cards
    whole = {"samples": max(method.samples // at_once, 1) * at_once}
    samples = read_samples(request, context, method.model_copy(update=whole), task, form, layout)
    encoded, dataset = samples.encoded, samples.dataset
    data = plan_data(hpu, form, request.batch_size, layout, task)
    warmup = max(request.measure.warmup, SPEC.warmup_passes) if request.measure.warmup else 0
    rows = Rows(data, encoded.samples, warmup + method.steps)
    steps = Steps(context, request.measure, warmup, rows)
    if task.encoder_decoder:
        base_trainer, arguments = gaudi.GaudiSeq2SeqTrainer, gaudi.GaudiSeq2SeqTrainingArguments
    else:
        base_trainer, arguments = gaudi.GaudiTrainer, gaudi.GaudiTrainingArguments
    checkpointed = bool(request.parameters.get("gradient_checkpointing"))
    most_norm = request.parameters.get("max_gradient_norm") or 0.0  # the trainer's own default: 1
    schedule = request.parameters.get("learning_rate_schedule", "constant")
    last_step = request.parameters.get("schedule_steps")

    class Trainer(base_trainer):  # type: ignore[misc, valid-type]
        """Takes rows in order, and keeps each step's loss on the card."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(rows)  # type: ignore[arg-type]

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return super().create_scheduler(last_step or num_training_steps, optimizer)

        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*given, **named)
            steps.losses.append(loss.detach())
            return loss

    class Checkpointing(TrainerCallback):  # type: ignore[misc]
        """Switches checkpointing on again after the trainer has switched it off."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            _checkpoint_layers(applied.model)

    with (
        tempfile.TemporaryDirectory() as directory,
        HostMemoryPeak() as host_memory,
        # For accelerate: each rank has one card, its first.
        variables({"LOCAL_RANK": "0"} if cards > 1 else {}),
    ):
        trainer = Trainer(
            model=applied.model,
            gaudi_config=gaudi.GaudiConfig(use_fused_adam=True, use_fused_clip_norm=most_norm > 0),
            args=arguments(
                output_dir=directory,
                use_habana=True,
                use_lazy_mode=mode == "lazy",
                torch_compile=mode == "compile",
                torch_compile_backend="hpu_backend" if mode == "compile" else None,
                bf16="bf16" in (request.precision, request.parameters.get("autocast")),
                per_device_train_batch_size=request.batch_size,
                max_steps=warmup + method.steps,
                learning_rate=methods.learning_rate(method),
                lr_scheduler_type=schedule,
                max_grad_norm=most_norm,
                weight_decay=0.0,
                throughput_warmup_steps=warmup,
                pipelining_fwd_bwd=mode == "lazy",
                adjust_throughput=True,
                # It multiplies the loss by the number of cards; T5's and similar classes do not
                # divide by all cards' labels in return.
                average_tokens_across_devices=not task.encoder_decoder,
                dataloader_drop_last=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=rows,
            data_collator=default_collate,
            callbacks=[steps, *([Checkpointing()] if checkpointed else [])],
        )
        if trainer.args.world_size != cards:
            raise BadConfiguration(
                f"the library sees {trainer.args.world_size} processes where there are {cards}"
            )
        before = first_loss(applied.model, data, rows, rank)
        hpu.release_memory()
        hpu.reset_peak_memory()
        context.enter_phase("warmup")
        trainer.train()
    after, measured = first_loss(applied.model, data, rows, rank), steps.measured()
    details = {
        "learned": dataset.learned,
        **dataset.details,
        **encoded.details,
        "method": method.method,
        "trainer": base_trainer.__name__,
        **({"strategy": "ddp", "data_parallel": str(cards)} if cards > 1 else {}),
        "optimum_habana": version,
        "hpu_mode": mode,
        **({"new_weights": ", ".join(new)} if new else {}),
        **({"learning_rate_schedule": schedule} if schedule != "constant" else {}),
        "learning_rate": f"{methods.learning_rate(method):g}",
        "architecture": type(model).__name__,
        **({"adapter": applied.adapter} if applied.adapter else {}),
        **({"gradient_checkpointing": "torch's, use_reentrant=False"} if checkpointed else {}),
        "optimizer": f"the bridge's fused AdamW, epsilon {trainer.args.adam_epsilon:g}",
        **({"max_gradient_norm": f"{most_norm:g}"} if most_norm else {}),
        "host_memory_peak": host_memory.method,
        **measured.details,
        **loss_details(before, after, measured.samples),
    }
    if method.save_adapter and not request.probe and rank == 0:
        origin = {**origin_by(request), "method": method.method, "dataset": request.dataset}
        details["saved_adapter"] = str(
            saved_adapters.save_adapter(applied.model, method.save_adapter, origin)
        )
    return Result(
        samples=measured.samples,
        stop_reason=measured.stop_reason,
        load_s=load_s,
        **measured.warmup,
        weight_bytes=weights.weight_bytes,
        parameter_count=weights.parameter_count,
        trainable_parameter_count=sum(
            p.numel() for p in applied.model.parameters() if p.requires_grad
        ),
        train_flops_per_token=flops_per_token(task, applied.model, encoded.samples),
        baseline_host_memory_bytes=baseline,
        peak_host_memory_bytes=host_memory.bytes,
        peak_device_memory_bytes=hpu.peak_memory_bytes(),
        random_weights=with_new_weights(source, new).random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=applied.detail,
        metrics={"first_batch_loss_before": before, "first_batch_loss_after": after},
        details=details,
    )


def _checkpoint_layers(model: Any) -> None:
    """Enable gradient checkpointing with torch's function; the library's copy is incompatible with
    torch's early stop and fails in T5's backward pass."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(inner, "supports_gradient_checkpointing", False):
        raise Unsupported(f"{type(inner).__name__} has no gradient checkpointing")
    inner._set_gradient_checkpointing(
        enable=True,
        gradient_checkpointing_func=partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    )
