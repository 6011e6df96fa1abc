"""The timed part of a job: warm-up, repeats, card checks, and here the figures derived from a row's
timed samples; other packages add theirs by the entry points ``nightgrid.metrics``
(docs/extending.md)."""

from __future__ import annotations

from workloads.base import Metric, Timed
from workloads.util.statistics import percentile


def _padding_share(timed: Timed) -> float | None:
    # A rank that shares its prompts with another one counts none of them.
    counted = [sample for sample in timed.samples if sample.items]
    computed = sum(sample.computed_tokens for sample in counted)
    # The last token of a text is not fed back.
    wanted = sum(s.input_tokens + max(0, s.output_tokens - s.items) for s in counted)
    return 1 - wanted / computed if computed >= wanted > 0 else None


PADDING_SHARE = Metric(
    name="padding_share",
    title="padding",
    description="Share of the computed positions that were padding or past the end of a text.",
    figure=_padding_share,
    of=("causal-lm",),
)


def _prefill_tokens_per_s(timed: Timed) -> float | None:
    read = [s for s in timed.samples if s.ttft_s is not None and s.input_tokens and s.output_tokens]
    times_s = {sample.ttft_s for sample in read}
    if any(item.ttft_s not in times_s for item in timed.items):
        return None  # continuous batching: a sample has the mean of prompts that were read in turn
    took_s = sum(sample.ttft_s or 0.0 for sample in read)
    return sum(sample.input_tokens for sample in read) / took_s if took_s > 0 else None


PREFILL_TOKENS_PER_S = Metric(
    name="prefill_tokens_per_s",
    title="prefill",
    unit="tokens/s",
    description="Real tokens of prompts over the time to the first token, of each card; none where "
    "prompts are read in turn (continuous batching).",
    better="higher",
    ranks="sum",
    figure=_prefill_tokens_per_s,
    of=("text-generation",),
)


def _tokens_per_s_per_user(timed: Timed) -> float | None:
    step_s = percentile([step for sample in timed.samples for step in sample.step_s], 50)
    return 1 / step_s if step_s else None


TOKENS_PER_S_PER_USER = Metric(
    name="tokens_per_s_per_user",
    title="each user",
    unit="tokens/s",
    description="Inverse of the median time per output token (1/TPOT).",
    better="higher",
    figure=_tokens_per_s_per_user,
    of=("text-generation",),
)

SPECS = (PADDING_SHARE, PREFILL_TOKENS_PER_S, TOKENS_PER_S_PER_USER)
