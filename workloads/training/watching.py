"""A profile of training, of which nothing remains: what follows sees the model as it was timed."""

from __future__ import annotations

import dataclasses

from workloads.profiling import Profile, profiled
from workloads.techniques.base import StepBatch, Training
from workloads.training.resuming import restore
from workloads.training.saver import on_host, weights_of
from workloads.training.step import Steps


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
