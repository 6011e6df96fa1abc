"""Parts of times, which may not exceed the whole."""

from __future__ import annotations

import math

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags.possible.recount import Check, RawCheck, Recount
from orchestrator.report.units import seconds

#: Parts may exceed their whole by this much: clocks are read one after the other.
SHARE, SLACK_S = 0.01, 0.005
#: An attempt is timed by the clock of the day, which is set now and then.
SPAN_SHARE, SPAN_SLACK_S = 0.05, 2.0

PARTS = (
    *("data_s", "forward_s", "backward_s", "optimizer_s", "encoder_s"),
    *("text_encoding_s", "denoising_s", "decoding_s", "conversion_s"),
)


def _walls(_: Measurement, raw: Recount) -> str | None:
    for sample in raw.timed:
        if sample.wall_s <= 0:
            return f"a batch took {seconds(sample.wall_s)}"
    return None


def _steps(row: Measurement, raw: Recount) -> str | None:
    """First token and steps of a batch. Under continuous batching prompts are read between steps,
    and the time to first token is their mean, so that the two overlap."""
    read_first = apart(row)
    for sample in raw.timed:
        steps_s, first_s = math.fsum(sample.step_s), sample.ttft_s or 0.0
        parts_s = first_s + steps_s if read_first else max(first_s, steps_s)
        if parts_s > _most(sample.wall_s):
            return f"the steps of a batch took {seconds(parts_s)} of its {seconds(sample.wall_s)}"
    return None


def _unexplained(row: Measurement, raw: Recount) -> str | None:
    """A batch whose every step was timed has nothing else to do that takes as long again."""
    if not apart(row):
        return None
    for sample in raw.timed:
        if sample.step_s and sample.ttft_s is not None:
            parts_s = sample.ttft_s + math.fsum(sample.step_s)
            if sample.wall_s > 2 * parts_s + 1.0:
                return (
                    f"a batch took {seconds(sample.wall_s)}, its first token and steps "
                    f"{seconds(parts_s)}"
                )
    return None


def _training_step(_: Measurement, raw: Recount) -> str | None:
    for sample in raw.timed:
        parts_s = math.fsum(getattr(sample, name) or 0.0 for name in PARTS)
        longest_s = max(parts_s, sample.communication_s or 0.0)
        if longest_s > _most(sample.wall_s):
            return f"parts of a step took {seconds(longest_s)} of its {seconds(sample.wall_s)}"
    return None


def _prompts(_: Measurement, raw: Recount) -> str | None:
    if not raw.items:
        return None
    longest_s = max(sample.wall_s for sample in raw.last)
    for item in raw.items:
        if item.latency_s > _most(longest_s):
            return f"a prompt took {seconds(item.latency_s)}, its batch {seconds(longest_s)}"
        if item.ttft_s is not None and item.ttft_s > _most(item.latency_s):
            return (
                f"a prompt's first token took {seconds(item.ttft_s)} of "
                f"{seconds(item.latency_s)} for all"
            )
    return None


def _prompt_steps(row: Measurement, raw: Recount) -> str | None:
    """The tokens of a prompt cannot come faster than the fastest step of its repeat. (Under
    continuous batching a prompt that came last does not wait for the reading of others, which is
    a part of every recorded step.)"""
    if not raw.items or not apart(row):
        return None
    fastest_s = min((step for sample in raw.last for step in sample.step_s), default=0.0)
    for item in raw.items:
        if item.ttft_s is not None and fastest_s:
            least_s = item.ttft_s + fastest_s * (item.output_tokens - 1)
            if item.latency_s < least_s * (1 - SHARE) - SLACK_S:
                return (
                    f"a prompt of {item.output_tokens} tokens took {seconds(item.latency_s)}; at "
                    f"the fastest step of all that takes {seconds(least_s)}"
                )
    return None


def _span(row: Measurement) -> str | None:
    """Everything that was timed happened between the attempt's start and end."""
    if row.started_at is None or row.ended_at is None:
        return None
    span_s = row.ended_at - row.started_at
    load_s = row.load_s or 0.0
    compiled_s = (row.compile_s or 0.0) - load_s  # as much of it may have been while loading
    known = (load_s, max(compiled_s, row.warmup_s or 0.0), row.metrics.measure_s)
    parts_s = math.fsum(part or 0.0 for part in known)
    if parts_s <= max(0.0, span_s) * (1 + SPAN_SHARE) + SPAN_SLACK_S:
        return None
    return f"loading, warm-up and timed part took {seconds(parts_s)} of {seconds(span_s)}"


def _warmup(row: Measurement, _: Recount) -> str | None:
    spent_s = math.fsum(sample.wall_s for rank, sample in row.samples if sample.warmup and not rank)
    if row.warmup_s is None or not spent_s or spent_s <= _most(row.warmup_s):
        return None
    return f"warm-up took {seconds(row.warmup_s)}, its batches {seconds(spent_s)}"


def apart(row: Measurement) -> bool:
    """Return whether a batch is read as a whole before its steps begin."""
    return row.parameters.get("batching", "static") in ("static", "sorted")


def _most(whole_s: float) -> float:
    return whole_s * (1 + SHARE) + SLACK_S


CHECKS: tuple[Check, ...] = (_span,)
RAW_CHECKS: tuple[RawCheck, ...] = (
    _walls,
    _steps,
    _unexplained,
    _training_step,
    _prompts,
    _prompt_steps,
    _warmup,
)
