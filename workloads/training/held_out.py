"""Quality beside speed in fine-tuning: the loss on answers that the model was not trained on.

A technique, a method or a precision may change what is learned. The loss on the first batch, which
was learned from, says little of that; the loss on examples that are held out does. They are the
last of the dataset, so that jobs that hold out equally many are held against the same answers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from workloads.techniques.base import DataPlan, Objective, Training
from workloads.training import rows
from workloads.training.samples import Learnable
from workloads.training.step import Steps, batch_maker


def loss(
    steps: Steps,
    training: Training,
    data: DataPlan,
    samples: Sequence[Learnable],
    gather: Callable[[Any], list[Any]],
    objective: Objective | None = None,
) -> float:
    """Mean loss of the learned tokens of these samples, as the model is now, without dropout.
    It is the task's unless an objective is given, whatever is trained by.

    They are read in batches of training's size, in their order; the last one is filled from the
    first samples. Every rank computes its part.
    """
    in_order = dataclasses.replace(data, arrange=rows.in_order)
    make = batch_maker(in_order, samples, training.layout.data_rank)
    batches = -(-len(samples) // (data.batch_size * data.cards))
    summed = tokens = 0.0
    compiled = training.model._compiled_call_impl
    training.model.eval()
    training.model._compiled_call_impl = None  # a look at the losses needs no graphs of its own
    try:
        for number in range(batches):
            step = make(number)
            mean = steps.evaluate(step, objective or training.plain_loss)
            summed += mean * step.loss_tokens
            tokens += step.loss_tokens
    finally:
        training.model._compiled_call_impl = compiled
        training.model.train()
    each = gather(summed / tokens)
    return math.fsum(each) / len(each)
