"""A metric: one more figure for rows of Nightgrid's own fine-tuning, from their raw samples."""

from workloads.base import Metric

SPEC = Metric(
    name="last_step_loss",
    title="last loss",
    unit="nats",
    description="Loss of the last step.",
    better="lower",
    figure=lambda timed: timed.samples[-1].loss,
    of=("finetuning",),
)
