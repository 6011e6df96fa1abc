"""A metric: one more figure for rows of Nightgrid's own fine-tuning, from their raw samples."""

from workloads.metrics import Metric

SPEC = Metric(
    name="lowest_step_loss",
    title="lowest loss of a step",
    unit="nats",
    description="Lowest loss of any timed step.",
    better="lower",
    figure=lambda timed: min(sample.loss for sample in timed.samples),
    of=("finetuning",),
)
