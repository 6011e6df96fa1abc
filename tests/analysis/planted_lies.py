"""Lies to plant into rows of a real card: each changes stored facts as a defect would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from orchestrator.analysis.samples import metrics_of
from orchestrator.core.measurement import Measurement
from orchestrator.store.codec import from_table
from orchestrator.store.schema import OUT_OF_RANGE
from workloads import registry
from workloads.base import Item, Sample

ROWS = Path(__file__).resolve().parents[2] / "results" / "h100" / "grids.parquet"

Lie = Callable[[Measurement], Measurement]


@cache
def rows_of_the_card() -> tuple[Measurement, ...]:
    """Rows of a real H100."""
    return tuple(from_table(pq.read_table(ROWS), source=str(ROWS)))


def generation() -> Measurement:
    """Static batching of 32 prompts, 128 tokens read and written each, in bf16, with energy."""
    return _one(lambda r: r.run == "g2-precision" and r.precision == "bf16" and r.batch_size == 32)


def slow() -> Measurement:
    """The same model at batch size 1 in fp32."""
    return _one(lambda r: r.run == "g2-precision" and r.precision == "fp32" and r.batch_size == 1)


def continuous() -> Measurement:
    """Continuous batching of 64 prompts in 32 rows."""
    return _one(lambda r: r.parameters.get("batching") == "refill" and r.batch_size == 32)


def training() -> Measurement:
    """Fine-tuning with LoRA, batch size 16, with energy."""
    return _one(lambda r: r.experiment == "techniques" and r.parameters["logits"] == "learned")


def _one(fits: Callable[[Measurement], bool]) -> Measurement:
    return next(row for row in rows_of_the_card() if fits(row))


def figures(**factors: float) -> Lie:
    def lie(row: Measurement) -> Measurement:
        changed = {name: getattr(row.metrics, name) * by for name, by in factors.items()}
        return replace(row, metrics=replace(row.metrics, **changed))

    return lie


def stored(**values: Any) -> Lie:
    return lambda row: replace(row, metrics=replace(row.metrics, **values))


def column(**changes: Callable[[Any], Any]) -> Lie:
    return lambda row: replace(
        row, **{name: change(getattr(row, name)) for name, change in changes.items()}
    )


def samples(**changes: Callable[[Sample], Any]) -> Lie:
    """Change each sample, and derive the figures anew: the lie was told when it was measured."""
    return _each("samples", changes)


def items(**changes: Callable[[Item], Any]) -> Lie:
    return _each("items", changes)


def _each(raw: str, changes: Mapping[str, Callable[[Any], Any]]) -> Lie:
    def lie(row: Measurement) -> Measurement:
        made = tuple(
            (rank, replace(one, **{name: change(one) for name, change in changes.items()}))
            for rank, one in getattr(row, raw)
        )
        return derived(replace(row, **{raw: made}))

    return lie


def derived(row: Measurement) -> Measurement:
    """The row with its figures as its samples give them; energy, which they do not tell, stays."""
    metrics = metrics_of(row.samples, row.items, throughput=registry.throughput_of(row.workload))
    kept = {name: getattr(row.metrics, name) for name in ("energy_j", "power_w", "energy_source")}
    return replace(row, metrics=replace(metrics, **kept))


def with_ids(row: Measurement, ids: Sequence[int], ends: str = "") -> Measurement:
    (rank, item), *others = row.items
    told = dict(row.details) | ({"end_token_ids": ends} if ends else {})
    return replace(row, details=told, items=((rank, replace(item, output_ids=tuple(ids))), *others))


def both(*lies: Lie) -> Lie:
    def lie(row: Measurement) -> Measurement:
        for one in lies:
            row = one(row)
        return row

    return lie


def times(row: Measurement, factor: float) -> Measurement:
    slower = both(
        samples(
            wall_s=lambda s: s.wall_s * factor,
            cpu_s=lambda s: s.cpu_s * factor,
            ttft_s=lambda s: None if s.ttft_s is None else s.ttft_s * factor,
            step_s=lambda s: tuple(step * factor for step in s.step_s),
            **{
                name: (lambda s, name=name: _times(getattr(s, name), factor))
                for name in ("data_s", "forward_s", "backward_s", "optimizer_s", "communication_s")
            },
        ),
        items(latency_s=lambda i: i.latency_s * factor, ttft_s=lambda i: _times(i.ttft_s, factor)),
    )
    found = slower(row)
    energy = found.metrics.energy_j
    power = None if energy is None else energy / (found.metrics.measure_s or 1.0)
    return replace(found, metrics=replace(found.metrics, power_w=power))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def timed_by(factor: float) -> Lie:
    return lambda row: times(row, factor)


def ran_for(factor: float) -> Lie:
    return lambda row: replace(
        row, ended_at=(row.started_at or 0) + factor * ((row.ended_at or 0) - (row.started_at or 0))
    )


#: Name of the lie, the row in which it is planted, the lie, and words of the reason.
LIES: list[tuple[str, Callable[[], Measurement], Lie, str]] = [
    # tokens and prompts
    (
        "generated tokens doubled in the rate",
        generation,
        figures(generated_tokens_per_s=2.0, throughput=2.0, throughput_high=2.0),
        "only|samples give",
    ),
    ("throughput alone", generation, figures(throughput=1.2, throughput_high=1.2), "throughput is"),
    ("total tokens below generated ones", generation, figures(total_tokens_per_s=0.4), "only"),
    ("total tokens too many", generation, figures(total_tokens_per_s=1.5), "total_tokens_per_s is"),
    ("prompts counted twice", generation, figures(items_per_s=2.0), "items_per_s is"),
    (
        "samples count double tokens",
        generation,
        samples(output_tokens=lambda s: 2 * s.output_tokens),
        "generated 8,192 tokens|counts",
    ),
    (
        "samples count padding as read",
        generation,
        samples(input_tokens=lambda s: 2 * s.input_tokens),
        "counts",
    ),
    (
        "twice the length read, in samples and prompts alike",
        generation,
        lambda row: items(input_tokens=lambda i: 2 * i.input_tokens)(
            samples(input_tokens=lambda s: 2 * s.input_tokens)(row)
        ),
        "prompts with 128 each",
    ),
    ("samples count more prompts", generation, samples(items=lambda s: 2 * s.items), "counts"),
    (
        "prompts of a greater length",
        generation,
        items(output_tokens=lambda i: i.output_tokens + 1),
        "counts|asked for",
    ),
    (
        "prompts that read more",
        generation,
        items(input_tokens=lambda i: i.input_tokens + 1),
        "counts",
    ),
    (
        "samples and prompts agree on tokens that were not asked for",
        generation,
        both(
            samples(output_tokens=lambda s: 2 * s.output_tokens),
            items(output_tokens=lambda i: 2 * i.output_tokens),
        ),
        "for 32 prompts of 128 each",
    ),
    (
        "a prompt was left out",
        generation,
        lambda row: replace(row, items=row.items[1:]),
        "prompts have|its prompts give",
    ),
    (
        "a long text of few tokens",
        generation,
        lambda row: replace(
            row, items=((0, replace(row.items[0][1], output_text="x" * 100_000)), *row.items[1:])
        ),
        "a text of 100,000 bytes",
    ),
    (
        "a token of which nobody has the id",
        generation,
        lambda row: with_ids(row, range(100, 227)),
        "counts as 128 tokens, and has 127 ids",
    ),
    (
        "tokens that come after the end of a text",
        generation,
        lambda row: with_ids(row, [*range(100, 220), 7, *range(220, 227)], ends="7 9"),
        "counts as 128 tokens, and ended after 121",
    ),
    (
        "fewer positions than tokens",
        generation,
        samples(computed_tokens=lambda s: s.computed_tokens // 4),
        "the device worked on",
    ),
    (
        "real tokens beyond positions in training",
        training,
        samples(input_tokens=lambda s: 3 * s.computed_tokens),
        "the device worked on",
    ),
    (
        "another batch size than asked for",
        generation,
        column(batch_size=lambda n: 2 * n),
        "was asked for",
    ),
    (
        "samples that were not measured",
        continuous,
        lambda row: replace(row, samples=row.samples[:-1]),
        "samples",
    ),
    ("repeats that never were", slow, stored(repeats=9), "counts 9 repeats"),
    # speeds against the card
    ("ten times as fast by a slow clock", generation, timed_by(0.05), "of weights takes"),
    ("decoding beyond the memory's bandwidth", slow, timed_by(0.2), "of weights takes"),
    ("training beyond the arithmetic's peak", training, timed_by(0.2), "of the bf16 peak"),
    (
        "training steps of too many positions",
        training,
        samples(computed_tokens=lambda s: 40 * s.computed_tokens),
        "of the bf16 peak",
    ),
    (
        "decoding of too many positions",
        generation,
        samples(computed_tokens=lambda s: 1_000 * s.computed_tokens),
        "of the bf16 peak",
    ),
    (
        "fp32 at the speed of bf16",
        training,
        both(timed_by(0.5), column(precision=lambda _: "fp32")),
        "of the fp32 peak",
    ),
    (
        "a first token before the weights were read",
        slow,
        both(samples(ttft_s=lambda s: 1e-3), items(ttft_s=lambda i: 1e-3)),
        "a first token took",
    ),
    (
        "steps of which none was told",
        slow,
        lambda row: times(samples(step_s=lambda s: ())(row), 0.1),
        "of weights",
    ),
    (
        "an emulated card that is no processor",
        generation,
        column(
            emulated=lambda _: True,
            peak_device_memory_bytes=lambda _: None,
            threads=lambda _: 1,
            precision=lambda _: "fp32",
        ),
        "a core decoded",
    ),
    (
        "more memory than the card has",
        training,
        column(peak_device_memory_bytes=lambda _: 90 * 2**30),
        "were allocated",
    ),
    ("weights of a tenth of a byte", generation, column(weight_bytes=lambda n: n // 20), "B each"),
    (
        "weights of many bytes",
        generation,
        column(weight_bytes=lambda n: n * 8),
        "of weights takes|B each",
    ),
    (
        "parameters that the weights cannot hold",
        generation,
        column(parameter_count=lambda n: n * 30),
        "peak|B each",
    ),
    # parts of times
    (
        "steps longer than their batch",
        generation,
        samples(step_s=lambda s: tuple(2 * x for x in s.step_s)),
        "the steps of a batch took",
    ),
    (
        "a first token that took longer than the batch",
        generation,
        samples(ttft_s=lambda s: 2 * s.wall_s),
        "steps of a batch|only",
    ),
    (
        "a batch much longer than its steps",
        generation,
        samples(wall_s=lambda s: 5 * s.wall_s),
        "its first token and steps",
    ),
    ("a batch that took no time", generation, samples(wall_s=lambda s: -1.0), "a batch took"),
    (
        "parts of a training step beyond the step",
        training,
        samples(backward_s=lambda s: s.wall_s),
        "parts of a step",
    ),
    (
        "waiting longer than the step",
        training,
        samples(communication_s=lambda s: 2 * s.wall_s),
        "parts of a step",
    ),
    (
        "a prompt later than its batch",
        generation,
        items(latency_s=lambda i: 3 * i.latency_s),
        "a prompt took",
    ),
    (
        "prompts faster than their steps",
        generation,
        items(latency_s=lambda i: 0.5 * i.latency_s),
        "at the fastest step",
    ),
    (
        "a first token after the last",
        generation,
        items(ttft_s=lambda i: 2 * i.latency_s),
        "first token took",
    ),
    ("a shorter timed part", generation, figures(measure_s=0.5), "measure_s is"),
    ("a longer timed part", slow, figures(measure_s=2.0), "measure_s is"),
    ("less time of the processor", generation, figures(cpu_s=0.1), "cpu_s is"),
    (
        "more seconds than the attempt had",
        generation,
        ran_for(0.5),
        "loading, warm-up and timed part",
    ),
    ("an end before the start", generation, ran_for(-1.0), "loading, warm-up and timed part"),
    (
        "a load that the attempt had no time for",
        generation,
        column(load_s=lambda _: 500.0),
        "loading, warm-up",
    ),
    (
        "a warm-up shorter than its batches",
        generation,
        column(warmup_s=lambda s: s / 3),
        "warm-up took",
    ),
    ("time per token, halved", generation, figures(tpot_p50_s=0.5), "tpot_p50_s is"),
    ("percentiles out of order", generation, figures(tpot_p50_s=50.0), "only"),
    ("a slow tail left out", generation, stored(tpot_p99_s=None, tpot_p95_s=1e-9), "only"),
    ("time to first token, halved", slow, figures(ttft_s=0.5), "ttft_s is"),
    ("latency of another run", generation, figures(latency_p50_s=0.7), "latency_p50_s is"),
    ("loss of another training", training, figures(loss_last=0.5), "loss_last is"),
    ("an interval that leaves the figure out", generation, figures(throughput_low=3.0), "only"),
    (
        "a tighter interval than the repeats give",
        generation,
        figures(relative_half_width=0.01),
        "relative_half_width is",
    ),
    (
        "numbers that no column admits",
        generation,
        lambda row: replace(row, details={**row.details, OUT_OF_RANGE: "throughput=inf"}),
        "cannot be",
    ),
    # energy
    ("energy of half the timed part", generation, figures(energy_j=0.5), "its energy is that of"),
    (
        "energy of a part beyond the attempt",
        generation,
        figures(energy_j=40.0),
        "its energy is that of",
    ),
    ("joules a thousandth of themselves", generation, figures(energy_j=1e-3, power_w=1e-3), "drew"),
    ("power beyond the card's limit", generation, figures(energy_j=10.0, power_w=10.0), "drew"),
]
