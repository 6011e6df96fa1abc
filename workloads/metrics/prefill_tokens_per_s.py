"""The rate at which prompts are read: all of a prompt is one step, bound by arithmetic."""

from __future__ import annotations

from workloads.metrics.base import Metric, Timed


def _figure(timed: Timed) -> float | None:
    read = [s for s in timed.samples if s.ttft_s is not None and s.input_tokens and s.output_tokens]
    took_s = sum(sample.ttft_s or 0.0 for sample in read)
    return sum(sample.input_tokens for sample in read) / took_s if took_s > 0 else None


SPEC = Metric(
    name="prefill_tokens_per_s",
    title="prefill",
    unit="tokens/s",
    description="Real tokens of prompts over the time to the first token, of each card.",
    better="higher",
    ranks="sum",
    figure=_figure,
    of=("text-generation",),
)
