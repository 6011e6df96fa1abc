"""Nightgrid's own training loop: any method, any technique, one card or several.

Every optimizer step is one timed sample of the row: its repeat is the number of the step, warm-up
steps come first and are marked. The loss on the first batch is looked at again after the last step:
a loss that is no number, or that has not fallen there, is told in the row (``loss_flag``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workloads.base import BadConfiguration, JobContext, Request, Result
from workloads.devices.monitoring.host_memory import HostMemoryPeak, resident_bytes
from workloads.engines import find_engine
from workloads.finetuning_method import MethodParameters, method_for
from workloads.measure import Measured, instruments_of, measure
from workloads.parallel.layout import Layout, pipeline_size, tensor_size
from workloads.profiling import Profile
from workloads.techniques import chosen
from workloads.techniques.base import (
    DataPlan,
    Loading,
    StepBatch,
    Technique,
    Training,
    positions,
)
from workloads.techniques.optimizers import state_bytes
from workloads.training import held_out, methods, remains
from workloads.training.base_model import BaseModel, load_base
from workloads.training.flops import flops_per_token
from workloads.training.reading import ReadSamples, read_samples
from workloads.training.step import Steps, batch_maker, plan_data
from workloads.training.watching import profile_steps
from workloads.warmup import WarmupPlan, repeated_if_compiled
from workloads.weights import held_bytes

_evicting = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One pass over a job, of the one or two that there are."""

    ending: contextlib.ExitStack  # of this pass
    job_ending: contextlib.ExitStack  # of the last one
    begins_anew: str  # reason why it does not go on from a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A base model with its method, and what that took."""

    base: BaseModel
    applied: methods.Applied
    details: dict[str, str]  # of what was loaded, for the row
    load_s: float
    baseline_host_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """The model before cards divide it among them."""

    flops_per_token: float
    trainable: int


def run(request: Request, context: JobContext) -> Result:
    """Train, step by timed step; see ``workloads.base.Workload``."""

    reasons = iter(("", "repeated after compilation"))
    with contextlib.ExitStack() as job_ending:

        def once() -> Result:
            with contextlib.ExitStack() as ending:
                taken = _Pass(ending=ending, job_ending=job_ending, begins_anew=next(reasons))
                return _run(request, context, taken)

        return repeated_if_compiled(once, request, context)


def _run(request: Request, context: JobContext, taken: _Pass) -> Result:
    parameters = request.parameters
    method = method_for(parameters, probe=request.probe)
    techniques = chosen(parameters)
    context.device.seed(0)
    context.enter_phase("load")
    loaded = _load(request, context, method, techniques, taken.ending)
    layout = Layout(
        rank=context.rank,
        world_size=context.world_size,
        tensor=tensor_size(parameters, context.world_size),
        pipeline=pipeline_size(parameters, context.world_size),
    )
    form = loaded.base.format(request.parameters)
    source = read_samples(request, context, method, loaded.base.task, form, layout)
    data = plan_data(context.device, form, request.batch_size, layout, loaded.base.task)
    data.ending = taken.ending
    for technique in techniques:
        technique.on_data(data)
    # Ranks that share a batch drop out each its own; those that split matrices drop out together.
    seed = layout.data_rank
    context.device.seed(seed)
    training, whole = _training(
        request, context, method, techniques, loaded, layout, data, source, taken
    )
    make = batch_maker(data, source.encoded.samples, layout.data_rank)
    data.first_step = training.first_step
    steps = Steps(training, techniques, data, data.feed(make))
    for technique in techniques:
        technique.before_steps(training, lambda step: steps.rehearse(make(step)))

    def restart() -> None:
        """Draw the random numbers that the first step of this attempt meets."""
        if training.random_state is None:
            context.device.seed(seed)
        else:
            context.device.restore_random_state(training.random_state)

    if training.random_state is not None:
        restart()
    context.device.release_memory()
    context.device.reset_peak_memory()
    if context.world_size > 1:
        training.details["weight_bytes_per_card"] = str(held_bytes(training.model))
    with HostMemoryPeak() as host_memory:
        measured = _measure(steps, make, training, request, context, restart)
    peak_device_memory_bytes = context.device.peak_memory_bytes()
    profile = Profile()
    if request.parameters.get("profile") and not request.probe:
        profile = profile_steps(training, steps, make(training.first_step))
    for technique in reversed(techniques):  # what came last is still as it was made
        technique.after_steps(training)
    details = {
        **loaded.details,
        **data.details,
        "learned": source.dataset.learned,
        **source.encoded.details,
        **training.details,
        "optimizer_state_bytes": str(state_bytes(training.optimizer)),
        **measured.details,
        **profile.details,
        "host_memory_peak": host_memory.method,
    }
    metrics, flag = remains.losses(
        measured.samples,
        sum(training.losses[0]),
        context.collective.gather,
        steps.evaluate(make(0)),
    )
    metrics |= loaded.base.source.metrics()
    metrics |= training.metrics
    details |= flag
    if not request.probe:
        if training.held_out_loss is not None:
            metrics["held_out_loss"] = training.held_out_loss()
            for name, objective in training.held_out_metrics.items():
                metrics[name] = training.held_out_loss(objective)
        kept, converted = remains.finish(
            request, context, method, training, loaded.base.source, steps, make
        )
        details |= kept
        metrics |= converted
    return Result(
        samples=measured.samples,
        stop_reason=measured.stop_reason,
        load_s=loaded.load_s,
        compile_s=training.compile_s,
        **measured.warmup,
        weight_bytes=loaded.applied.weights.weight_bytes,
        parameter_count=loaded.applied.weights.parameter_count,
        trainable_parameter_count=whole.trainable,
        train_flops_per_token=whole.flops_per_token,
        tokenization_s=source.tokenization_s,
        baseline_host_memory_bytes=loaded.baseline_host_memory_bytes,
        peak_host_memory_bytes=host_memory.bytes,
        peak_device_memory_bytes=peak_device_memory_bytes,
        random_weights=loaded.base.source.random_weights,
        synthetic_data=source.dataset.synthetic,
        precision_detail=loaded.applied.detail,
        metrics=metrics,
        details=details,
        trace=profile.trace if context.rank == 0 else None,
    )


def _load(
    request: Request,
    context: JobContext,
    method: MethodParameters,
    techniques: Sequence[Technique],
    ending: contextlib.ExitStack,
) -> _Loaded:
    """A model of this job's own: training changes it, so no other job may use it."""
    device = context.device
    # A key that no job has: whatever a worker kept for others makes room.
    context.resident(f"{request.residency_key}|{next(_evicting)}", lambda: None)
    device.release_memory()
    baseline = resident_bytes()
    began = context.clock()
    loading = Loading(
        device=device,
        model_arguments=methods.loading_arguments(method.method, request.precision, device),
        tokenizer_arguments={},
        method=method.method,
        fresh=request.parameters.get("initial_weights") == "fresh",
        ending=ending,
    )
    for technique in techniques:
        technique.before_load(loading)
    base = load_base(
        request.workload,
        request.model,
        methods.base_precision(method.method, request.precision),
        loading,
    )
    device.seed(0)  # adapters start from random numbers
    applied = methods.apply(base.model, method, request.precision, device.name)
    if "device_map" not in loading.model_arguments:  # else it is there, and may not be moved
        applied.model.to(device.torch_device)
    applied.model.train()
    device.synchronize()
    return _Loaded(
        base=base,
        applied=applied,
        details=loading.details,
        load_s=context.clock() - began,
        baseline_host_memory_bytes=baseline,
    )


def _training(
    request: Request,
    context: JobContext,
    method: MethodParameters,
    techniques: Sequence[Technique],
    loaded: _Loaded,
    layout: Layout,
    data: DataPlan,
    source: ReadSamples,
    taken: _Pass,
) -> tuple[Training, _Whole]:
    """The model with everything that the techniques do to it, and its optimizer."""
    import torch

    rate = methods.learning_rate(method)

    def update() -> None:
        for act in training.before_update:
            act()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)

    training = Training(
        device=context.device,
        task=loaded.base.task,
        cards=context.world_size,
        layout=layout,
        batch_size=data.batch_size,
        micro_batches=data.micro_batches,
        method=method.method,
        precision=request.precision,
        model=loaded.applied.model,
        learning_rate=rate,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        loss=loaded.base.task.function("loss"),
        backward=lambda loss: loss.backward(),
        update=update,
        steps=request.measure.warmup + method.steps,
        least_steps=request.measure.warmup + min(request.measure.min_repeats, method.steps),
        enter_phase=context.enter_phase,
        ending=taken.ending,
        job_ending=taken.job_ending,
        begins_anew=taken.begins_anew,
        kept_as=request.kept_as,
        attempt=request.attempt,
        gather=context.collective.gather,
        details={
            "method": method.method,
            "learning_rate": f"{rate:g}",
            "architecture": type(loaded.base.model).__name__,
            **({"adapter": loaded.applied.adapter} if loaded.applied.adapter else {}),
            **({"remote_code": "allowed"} if loaded.base.source.remote_code else {}),
        },
    )
    if source.held_out and not request.probe:
        plain, gather = Steps(training, (), data, iter(())), context.collective.gather
        training.held_out_loss = lambda objective=None: held_out.loss(
            plain, training, data, source.held_out, gather, objective
        )
    for technique in techniques:
        technique.on_model(training)
    if not training.trainable():
        raise BadConfiguration("nothing is left to train: everything is frozen")
    whole = _Whole(
        flops_per_token=flops_per_token(training.task, training.model, source.encoded.samples),
        trainable=sum(parameter.numel() for parameter in training.trainable()),
    )
    for technique in techniques:
        technique.on_cards(training)
    training.optimizer = training.make_optimizer(training.trainable())
    for technique in techniques:
        technique.on_optimizer(training)
    return training, whole


def _measure(
    steps: Steps,
    make: Callable[[int], StepBatch],
    training: Training,
    request: Request,
    context: JobContext,
    restart: Callable[[], None],
) -> Measured:
    """Rehearsals and warm-up steps, then exactly the steps asked for unless the time is up.

    How many rehearsals there are, hangs on the clock; what is learned must not, so each leaves
    weights, gradients and random numbers as they are before the first step. An attempt that goes on
    from a checkpoint warms up anew, as its process does, with the first steps that are left.
    """
    spec, first = find_engine(request.engine), training.first_step
    warmup = request.measure.warmup
    timed = range(first + warmup, training.steps) if warmup else ()
    shapes = [make(step).shape for step in timed]
    if shapes:
        longest = max((part for shape in shapes for part in shape), key=positions)
        training.details["memory_reserved_at"] = " x ".join(map(str, longest))

    def rehearse(number: int) -> None:
        steps.rehearse(make(timed[number]))
        restart()

    left = training.steps - first - warmup
    once = dataclasses.replace(
        request.measure,
        min_repeats=left,
        max_repeats=left,
        relative_half_width=0.0,  # steps are of unlike work, and how many changes what is learned
        least_s=0.0,
    )
    return measure(
        steps.run_batch,
        1,
        once,
        instruments_of(context, counted=spec.counts_compilations),
        WarmupPlan(
            shapes=shapes,
            sizes=[max(map(positions, shape)) for shape in shapes],
            first=first,
            rehearse=rehearse,
            compiled=not context.device.spec.can("dynamic_shapes"),
            restarts=False,
        ),
    )
