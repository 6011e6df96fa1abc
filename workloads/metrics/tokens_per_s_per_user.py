"""The rate at which each user sees tokens come: the inverse of the time per output token."""

from __future__ import annotations

from workloads.confidence import percentile
from workloads.metrics.base import Metric, Timed


def _figure(timed: Timed) -> float | None:
    step_s = percentile([step for sample in timed.samples for step in sample.step_s], 50)
    return 1 / step_s if step_s else None


SPEC = Metric(
    name="tokens_per_s_per_user",
    title="each user",
    unit="tokens/s",
    description="Inverse of the median time per output token (1/TPOT).",
    better="higher",
    figure=_figure,
    of=("text-generation",),
)
