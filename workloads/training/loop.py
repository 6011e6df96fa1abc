"""Nightgrid's own training loop: any method, any technique, one card or several.

Every optimizer step is one timed sample, its repeat the number of the step. The first batch's loss
is computed again after the last step; what is wrong with the losses stands in the row's details.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from workloads import registry
from workloads.base import BadConfiguration, JobContext, Request, Result, Unsupported
from workloads.bench.measure import Measured, measure
from workloads.bench.profiling import Profile, profiled
from workloads.bench.warmup import WarmupPlan, repeated_if_compiled
from workloads.devices.monitor.host import HostMemoryPeak, resident_bytes
from workloads.engines import find_engine
from workloads.models import precision as weights
from workloads.models.catalog import positions_of
from workloads.models.loading import (
    ModelSource,
    load_config,
    load_tokenizer,
    open_model,
    with_new_weights,
)
from workloads.models.products import origin_by, save_trained
from workloads.models.prompts import prompt_details
from workloads.registry import TaskSpec
from workloads.training import methods, saved_adapters
from workloads.training.checkpoints import on_host, restore, tensor_bytes, weights_of
from workloads.training.data import ReadSamples, SampleFormat, read_samples
from workloads.training.losses import loss_details
from workloads.training.parallel.layout import Layout, pipeline_size, tensor_size
from workloads.training.step import Steps, batch_maker, flops_per_token, plan_data
from workloads.training.technique import DataPlan, Loading, StepBatch, Training, positions
from workloads.training.techniques import chosen

_job_number = itertools.count()


def run(request: Request, context: JobContext) -> Result:
    """Train, step by timed step; see ``workloads.base.Workload``."""
    reasons = iter(("", "repeated after compilation"))  # not to go on from a checkpoint
    with contextlib.ExitStack() as job_ending:

        def once() -> Result:
            with contextlib.ExitStack() as ending:
                return _TrainingJob(request, context, ending, job_ending, next(reasons)).run()

        return repeated_if_compiled(once, request, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A model on its card, before any method."""

    model: Any
    tokenizer: Any
    source: ModelSource
    task: TaskSpec


def load_base(workload: str, name: str, precision: str, loading: Loading) -> BaseModel:
    """Load a model in ``precision`` with the arguments of method and techniques; Unsupported if the
    card lacks the precision, or the model the attention."""
    device = loading.device
    if lacking := device.lacks(precision):
        raise Unsupported(f"{precision}: {lacking}")
    source = loading.source = open_model(name, weights=not loading.fresh, protected=True)
    task = registry.task_for(workload, source.entry)
    weights.check_shapes(load_config(source), precision, device.name)
    tokenizer = load_tokenizer(source, **loading.tokenizer_arguments)
    if loading.fresh:
        model = task.function("make")(source, len(tokenizer), **loading.model_arguments)
    else:
        model = task.function("load")(source, **loading.model_arguments)
    if "device_map" not in loading.model_arguments:
        model.to(device.torch_device)
    weights.finish_loading(model, precision, device.name)
    for check in loading.checks:
        check(model, tokenizer)
    for change in loading.changes:
        model = change(model, tokenizer, task)
    if new := getattr(model, "new_weights", ()):
        loading.details["new_weights"] = ", ".join(new)
        source = loading.source = with_new_weights(source, new)
    return BaseModel(model=model, tokenizer=tokenizer, source=source, task=task)


@dataclass
class _TrainingJob:
    """One of at most two passes over a job."""

    request: Request
    context: JobContext
    ending: contextlib.ExitStack  # closed after this pass
    job_ending: contextlib.ExitStack  # closed after the last
    begins_anew: str
    load_s: float = 0.0
    baseline_host_memory_bytes: int = 0
    details: dict[str, str] = field(default_factory=dict)  # for the row

    def __post_init__(self) -> None:
        parameters, cards = self.request.parameters, self.context.world_size
        self.method = methods.method_of(parameters, probe=self.request.probe)
        self.techniques = chosen(parameters)
        self.layout = Layout(
            rank=self.context.rank,
            world_size=cards,
            tensor=tensor_size(parameters, cards),
            pipeline=pipeline_size(parameters, cards),
        )

    def run(self) -> Result:
        request, context, method = self.request, self.context, self.method
        parameters, device, layout = request.parameters, context.device, self.layout
        device.seed(0)
        context.enter_phase("load")
        base, applied = self._load()
        pad = getattr(base.tokenizer, "pad_token_id", None)
        form = SampleFormat(
            tokenizer=base.tokenizer,
            source=base.source,
            config=base.model.config,
            parameters=parameters,
            pad_token_id=pad if isinstance(pad, int) else 0,
            context_length=positions_of(base.model.config.to_dict()),
        )
        source = read_samples(request, context, method, base.task, form, layout)
        data = plan_data(device, form, request.batch_size, layout, base.task)
        data.ending = self.ending
        for technique in self.techniques:
            technique.on_data(data)
        # Dropout differs between data-parallel ranks, not between those that split matrices.
        device.seed(layout.data_rank)
        training = self._training(base, applied, data, source)
        for technique in self.techniques:
            technique.on_model(training)
        if not training.trainable():
            raise BadConfiguration("nothing is left to train: everything is frozen")
        # Before the cards divide the model among them.
        flops = flops_per_token(training.task, training.model, source.encoded.samples)
        trainable = sum(parameter.numel() for parameter in training.trainable())
        for technique in self.techniques:
            technique.on_cards(training)
        training.optimizer = training.make_optimizer(training.trainable())
        for technique in self.techniques:
            technique.on_optimizer(training)

        make = batch_maker(data, source.encoded.samples, layout.data_rank)
        data.first_step = training.first_step
        steps = Steps(training, self.techniques, data, data.feed(make))
        for technique in self.techniques:
            technique.before_steps(training, lambda step: steps.rehearse(make(step)))
        if training.random_state is not None:
            self._restart(training)
        device.release_memory()
        device.reset_peak_memory()
        if context.world_size > 1:
            training.details["weight_bytes_per_card"] = str(
                weights.card_weight_bytes(training.model)
            )
        with HostMemoryPeak() as host_memory:
            measured = self._measure(steps, make, training)
        peak_device_memory_bytes = device.peak_memory_bytes()
        profile = Profile()
        if parameters.get("profile") and not request.probe:
            profile = profile_steps(training, steps, make(training.first_step))
        training.undo.close()
        for technique in reversed(self.techniques):  # what came last is still as it was made
            technique.after_steps(training)
        details = {
            **self.details,
            **prompt_details(base.tokenizer),
            **data.details,
            "learned": source.dataset.learned,
            **source.dataset.details,
            **source.encoded.details,
            **training.details,
            "optimizer_state_bytes": str(tensor_bytes([*training.optimizer.state.values()])),
            **measured.details,
            **profile.details,
            "host_memory_peak": host_memory.method,
        }
        pairs = context.collective.gather((sum(training.losses[0]), steps.evaluate(make(0))))
        before, after = (math.fsum(values) / len(pairs) for values in zip(*pairs, strict=True))
        metrics = {"first_batch_loss_before": before, "first_batch_loss_after": after}
        metrics |= base.source.metrics() | training.metrics
        details |= loss_details(before, after, measured.samples)
        if not request.probe:
            if training.held_out_loss is not None:
                metrics["held_out_loss"] = training.held_out_loss()
                for name, objective in training.held_out_metrics.items():
                    metrics[name] = training.held_out_loss(objective)
            details |= self._save(training, base.source)
            if method.method.startswith("qat"):
                training.wrapper = None
                training.model, details["converted"] = methods.converted(training.model)
                metrics["converted_loss"] = steps.evaluate(make(0))
        return Result(
            samples=measured.samples,
            stop_reason=measured.stop_reason,
            load_s=self.load_s,
            compile_s=training.compile_s,
            **measured.warmup,
            weight_bytes=applied.weights.weight_bytes,
            parameter_count=applied.weights.parameter_count,
            trainable_parameter_count=trainable,
            train_flops_per_token=flops,
            tokenization_s=source.tokenization_s,
            baseline_host_memory_bytes=self.baseline_host_memory_bytes,
            peak_host_memory_bytes=host_memory.bytes,
            peak_device_memory_bytes=peak_device_memory_bytes,
            random_weights=base.source.random_weights,
            synthetic_data=source.dataset.synthetic,
            precision_detail=applied.detail,
            metrics=metrics,
            details=details,
            trace=profile.trace if context.rank == 0 else None,
        )

    def _load(self) -> tuple[BaseModel, methods.Applied]:
        """Load a model for this job alone, since training changes it, and apply the method."""
        request, context, method = self.request, self.context, self.method.method
        device = context.device
        # A unique key evicts the worker's resident model.
        context.resident(f"{request.residency_key}|{next(_job_number)}", lambda: None)
        device.release_memory()
        self.baseline_host_memory_bytes = resident_bytes()
        began = context.clock()
        loading = Loading(
            device=device,
            model_arguments=methods.loading_arguments(method, request.precision, device),
            tokenizer_arguments={},
            fresh=request.parameters.get("initial_weights") == "fresh",
            details=self.details,
            ending=self.ending,
        )
        for technique in self.techniques:
            technique.before_load(loading)
        precision = methods.base_precision(method, request.precision)
        base = load_base(request.workload, request.model, precision, loading)
        device.seed(0)  # adapters start from random numbers
        applied = methods.apply(base.model, self.method, request.precision, device.name)
        if "device_map" not in loading.model_arguments:  # else it is there, and may not be moved
            applied.model.to(device.torch_device)
        applied.model.train()
        device.synchronize()
        self.load_s = context.clock() - began
        return base, applied

    def _training(
        self, base: BaseModel, applied: methods.Applied, data: DataPlan, source: ReadSamples
    ) -> Training:
        request, context, method = self.request, self.context, self.method
        rate = methods.learning_rate(method)
        training = Training(
            device=context.device,
            task=base.task,
            cards=context.world_size,
            layout=self.layout,
            batch_size=data.batch_size,
            micro_batches=data.micro_batches,
            method=method.method,
            precision=request.precision,
            model=applied.model,
            learning_rate=rate,
            steps=request.measure.warmup + method.steps,
            least_steps=request.measure.warmup + min(request.measure.min_repeats, method.steps),
            enter_phase=context.enter_phase,
            ending=self.ending,
            job_ending=self.job_ending,
            begins_anew=self.begins_anew,
            kept_as=request.kept_as,
            attempt=request.attempt,
            gather=context.collective.gather,
            details={
                "method": method.method,
                "learning_rate": f"{rate:g}",
                "architecture": type(base.model).__name__,
                **({"adapter": applied.adapter} if applied.adapter else {}),
                **({"remote_code": "allowed"} if base.source.remote_code else {}),
            },
        )
        self.ending.push(training.undo)  # where the job fails
        if source.held_out and not request.probe:
            steps = Steps(training, (), data, iter(()))
            training.held_out_loss = partial(steps.held_out_loss, source.held_out)
        return training

    def _restart(self, training: Training) -> None:
        if training.random_state is None:
            self.context.device.seed(self.layout.data_rank)
        else:
            self.context.device.restore_random_state(training.random_state)

    def _measure(
        self, steps: Steps, make: Callable[[int], StepBatch], training: Training
    ) -> Measured:
        """Run rehearsals, warm-up steps and the requested steps, within the time limit.

        The number of rehearsals depends on the clock, so they must not change weights, gradients
        or random state. A resumed attempt warms up anew with its first remaining steps.
        """
        settings, first = self.request.measure, training.first_step
        timed = range(first + settings.warmup, training.steps) if settings.warmup else ()
        shapes = [make(step).shape for step in timed]
        if shapes:
            longest = max((part for shape in shapes for part in shape), key=positions)
            training.details["memory_reserved_at"] = " x ".join(map(str, longest))

        def rehearse(number: int) -> None:
            steps.rehearse(make(timed[number]))
            self._restart(training)

        left = training.steps - first - settings.warmup
        once = dataclasses.replace(
            settings,
            min_repeats=left,
            max_repeats=left,
            relative_half_width=0.0,  # steps are of unlike work; how many changes what is learned
            least_s=0.0,
        )
        counted = find_engine(self.request.engine).counts_compilations
        return measure(
            steps.run_batch,
            1,
            once,
            self.context,
            WarmupPlan(
                shapes=shapes,
                sizes=[max(map(positions, shape)) for shape in shapes],
                first=first,
                rehearse=rehearse,
                compiled=not self.context.device.spec.can("dynamic_shapes"),
                restarts=False,
            ),
            counted=counted,
        )

    def _save(self, training: Training, source: ModelSource) -> dict[str, str]:
        request, context, method = self.request, self.context, self.method
        origin = {
            **origin_by(request),
            "method": method.method,
            "precision": request.precision,
            "dataset": request.dataset,
            "steps": method.steps,
            **training.origin,
        }
        details: dict[str, str] = {}
        if method.save_adapter or method.save_model:
            with training.gathered():
                if context.rank == 0 and method.save_adapter:
                    where = saved_adapters.save_adapter(training.model, method.save_adapter, origin)
                    details["saved_adapter"] = str(where)
                if context.rank == 0 and method.save_model:
                    where = save_trained(
                        training.model,
                        source,
                        method.save_model,
                        origin,
                        beside=training.saved_files,
                    )
                    details["saved_model"] = str(where)
            context.collective.gather(None)  # ranks end together, and with them the gang
        return details


def profile_steps(training: Training, steps: Steps, batch: StepBatch) -> Profile:
    """Profile optimizer steps on a batch, then restore all state.

    State that a library divides among cards cannot be restored: there only passes are profiled.
    """
    random = training.device.random_state()
    try:
        if training.divided is not None:
            profile = profiled(lambda: steps.rehearse(batch), training.device)
            text = f"{profile.details['profile']}, without the optimizer's update"
            return dataclasses.replace(profile, details={**profile.details, "profile": text})
        trained, _ = weights_of(training.model)
        before = on_host({"weights": trained, "optimizer": training.optimizer.state_dict()})
        remembered = on_host({name: one.state_dict() for name, one in training.stateful.items()})
        try:
            return profiled(lambda: steps.untimed(batch), training.device)
        finally:
            restore(training, before, remembered)
    finally:
        training.device.restore_random_state(random)
