"""The share of the computed positions that was in vain: padding, or past the end of a text."""

from __future__ import annotations

from workloads.metrics.base import Metric, Timed


def _figure(timed: Timed) -> float | None:
    # A rank that shares its prompts with another one counts none of them.
    counted = [sample for sample in timed.samples if sample.items]
    computed = sum(sample.computed_tokens for sample in counted)
    # The last token of a text is not fed back.
    wanted = sum(s.input_tokens + max(0, s.output_tokens - s.items) for s in counted)
    return 1 - wanted / computed if computed >= wanted > 0 else None


SPEC = Metric(
    name="padding_share",
    title="padding",
    description="Share of the computed positions that were padding or past the end of a text.",
    figure=_figure,
    of=("causal-lm",),
)
