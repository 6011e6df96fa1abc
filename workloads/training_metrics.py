"""Figures of all tasks that are trained, whatever the model predicts."""

from __future__ import annotations

from workloads.base import Metric

LOSSES = (
    Metric(
        name="first_batch_loss_before",
        title="loss before",
        description="Loss on the first batch before training.",
    ),
    Metric(
        name="first_batch_loss_after",
        title="loss after",
        description="Loss on the first batch after the last step.",
        better="lower",
    ),
    Metric(
        name="held_out_loss",
        title="held-out loss",
        description="Mean loss of the learned tokens of examples that are not trained on, after "
        "the last step (`held_out`).",
        better="lower",
        beside_speed=True,
    ),
)
