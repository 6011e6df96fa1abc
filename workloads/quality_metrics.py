"""Figures of quality that stand beside speed (``quality.py``)."""

from __future__ import annotations

from workloads.base import Metric

METRICS = (
    Metric(
        name="quality_top1_agreement",
        title="same tokens",
        description="Share of compared steps at which the plain path chooses the same token.",
        better="higher",
        equal_from=0.95,
    ),
    Metric(
        name="quality_kl",
        title="KL",
        unit="nats",
        description="Divergence of the next token's distribution from the plain path's, mean over "
        "compared steps; tokens beyond the 64 likeliest count as one.",
        better="lower",
    ),
    Metric(
        name="quality_loss",
        title="loss on the plain path's texts",
        unit="nats",
        description="Mean negative log-probability of the plain path's tokens.",
        better="lower",
    ),
    Metric(
        name="quality_reference_loss",
        title="the plain path's own",
        unit="nats",
        description="The same of the plain path itself.",
    ),
    Metric(
        name="quality_compared_tokens",
        title="steps compared",
        unit="tokens",
        description="Steps up to the first difference of each text from the plain path's.",
        better="higher",
    ),
    Metric(
        name="answer_loss",
        title="loss on the dataset's answers",
        unit="nats",
        description="Mean negative log-probability of the tokens of the dataset's first 8 answers, "
        "each read after its prompt, whose own tokens do not count.",
        better="lower",
    ),
)
