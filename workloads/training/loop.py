"""Nightgrid's own training loop: any method, any technique, one card or several.

Every optimizer step is one timed sample of the row: its repeat is the number of the step, warm-up
steps come first and are marked. The loss on the first batch is looked at again after the last step:
a loss that is no number, or that has not fallen there, is told in the row (``loss_flag``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads import precision as precisions
from workloads import registry, weights
from workloads.base import BadConfiguration, JobContext, Request, Result, Sample, Unsupported
from workloads.devices.monitoring.host_memory import HostMemoryPeak, resident_bytes
from workloads.engines import find_engine
from workloads.measure import Measured, instruments_of, measure
from workloads.models.loading import (
    ModelSource,
    load_config,
    load_tokenizer,
    open_model,
)
from workloads.models.saved import origin_by, save_trained
from workloads.profiling import Profile, profiled
from workloads.registry import TaskSpec
from workloads.training import adapters, methods
from workloads.training import step as held_out
from workloads.training.checkpoints import on_host, restore, weights_of
from workloads.training.data import ReadSamples, SampleFormat, read_samples
from workloads.training.methods import MethodParameters, method_for
from workloads.training.parallel.layout import Layout, pipeline_size, tensor_size
from workloads.training.step import Steps, batch_maker, flops_per_token, plan_data
from workloads.training.technique import (
    DataPlan,
    Loading,
    StepBatch,
    Technique,
    Training,
    positions,
)
from workloads.training.techniques import chosen
from workloads.training.techniques.optimization import state_bytes
from workloads.warmup import WarmupPlan, repeated_if_compiled
from workloads.weights import held_bytes

# The model that is trained, as loaded: weights, tokenizer, and what the loop needs to know.


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A model on its card, before any method."""

    model: Any
    tokenizer: Any
    source: ModelSource
    pad_token_id: int
    context_length: int | None
    task: TaskSpec

    def format(self, parameters: Mapping[str, Any]) -> SampleFormat:
        """The way in which a job's examples become its samples."""
        return SampleFormat(
            tokenizer=self.tokenizer,
            source=self.source,
            config=self.model.config,
            parameters=parameters,
            pad_token_id=self.pad_token_id,
            context_length=self.context_length,
        )


def load_base(workload: str, name: str, precision: str, loading: Loading) -> BaseModel:
    """Load a model in ``precision`` with the arguments that method and techniques want.

    Raises:
        DataMissing: it is not there, or incomplete.
        BadConfiguration: the workload takes no such model.
        Unsupported: this card cannot do the precision, or the model not the attention.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a worker's log is no terminal
    device = loading.device
    lacking = device.lacks(precision)
    if lacking:
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
    precisions.finish_loading(model, precision, device.name)
    for check in loading.checks:
        check(model, tokenizer)
    for change in loading.changes:
        model = change(model, tokenizer, task)
    if new := getattr(model, "new_weights", ()):
        loading.details["new_weights"] = ", ".join(new)
    pad = getattr(tokenizer, "pad_token_id", None)
    return BaseModel(
        model=model,
        tokenizer=tokenizer,
        source=source,
        pad_token_id=pad if isinstance(pad, int) else 0,
        context_length=getattr(model.config, "max_position_embeddings", None),
        task=task,
    )


# The remains of a training: a verdict on its losses, and the weights that are kept.


def losses(
    samples: Sequence[Sample],
    first_loss: float,
    gather: Callable[[Any], list[Any]],
    my_loss_after: float,
) -> tuple[dict[str, float], dict[str, str]]:
    """The loss on the first batch before and after training, and what is wrong with losses.

    Each rank has its part of that batch; the mean of their losses is that of the whole batch.
    """
    pairs = gather((first_loss, my_loss_after))
    before, after = (math.fsum(values) / len(pairs) for values in zip(*pairs, strict=True))
    found = {"first_batch_loss_before": before, "first_batch_loss_after": after}
    strange = [s.repeat for s in samples if s.loss is None or not math.isfinite(s.loss)]
    if strange:
        first = "before anything was learned" if strange[0] == 0 else f"first at step {strange[0]}"
        text = f"the loss is no number in {len(strange)} of {len(samples)} steps, {first}"
        return found, {"loss_flag": text}
    if not after < before:
        text = f"the loss on the first batch did not fall: {before:.6g} before, {after:.6g} after"
        return found, {"loss_flag": text}
    return found, {}


def finish(
    request: Request,
    context: JobContext,
    method: MethodParameters,
    training: Training,
    source: ModelSource,
    steps: Steps,
    make: Any,
) -> tuple[dict[str, str], dict[str, float]]:
    """Keep what remains of the trained model: an adapter or the whole model under its name, or
    converted weights and the loss that they have."""
    details: dict[str, str] = {}
    metrics: dict[str, float] = {}
    origin = {
        **origin_by(request),
        "method": method.method,
        "precision": request.precision,
        "dataset": request.dataset,
        "steps": method.steps,
        **training.origin,
    }
    if method.save_adapter:
        with training.gathered():
            if context.rank == 0:
                where = adapters.save_adapter(training.model, method.save_adapter, origin)
                details["saved_adapter"] = str(where)
        context.collective.barrier()  # ranks end together, and with them the gang
    if method.save_model:
        with training.gathered():
            if context.rank == 0:
                where = save_trained(training.model, source, method.save_model, origin)
                details["saved_model"] = str(where)
        context.collective.barrier()
    if method.method.startswith("qat"):
        training.wrapper = None
        training.model, details["converted"] = methods.converted(training.model)
        metrics["converted_loss"] = steps.evaluate(make(0))
    return details, metrics


# A profile of training, of which nothing remains: what follows sees the model as it was timed.


def profile_steps(training: Training, steps: Steps, batch: StepBatch) -> Profile:
    """Watch optimizer steps on a batch, then put back weights, optimizer, random numbers and what
    else remembers them. What a library divides among cards cannot be put back: there, passes
    forward and backward are watched."""
    random = training.device.random_state()
    try:
        return _watched(training, steps, batch)
    finally:
        training.device.restore_random_state(random)


def _watched(training: Training, steps: Steps, batch: StepBatch) -> Profile:
    if training.divided is not None:
        seen = profiled(lambda: steps.rehearse(batch), training.device)
        told = {"profile": f"{seen.details['profile']}, without the optimizer's update"}
        return dataclasses.replace(seen, details={**seen.details, **told})
    trained, _ = weights_of(training.model)
    before = on_host({"weights": trained, "optimizer": training.optimizer.state_dict()})
    remembered = on_host({name: each.state_dict() for name, each in training.stateful.items()})
    try:
        return profiled(lambda: steps.untimed(batch), training.device)
    finally:
        restore(training, before, remembered)


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
    metrics, flag = losses(
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
        kept, converted = finish(
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
