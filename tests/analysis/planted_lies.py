"""Honest rows, of a real card and simulated, and lies to plant into them as a defect would."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from core_cases import a_sample as sample
from hypothesis import strategies as st
from measurements import row as plain_row

from orchestrator.analysis.samples import metrics_of
from orchestrator.core.measurement import Measurement
from orchestrator.store.codec import measurements_of
from orchestrator.store.schema import OUT_OF_RANGE
from workloads import registry
from workloads.base import Item, Sample

ROWS = Path(__file__).resolve().parents[2] / "results" / "h100" / "grids.parquet"
PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s")

Lie = Callable[[Measurement], Measurement]

# ---------------------------------------------------------------- honest rows


@cache
def rows_of_the_card() -> tuple[Measurement, ...]:
    """Rows of seven grids on a real H100."""
    return tuple(measurements_of(pq.read_table(ROWS), source=str(ROWS)))


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


def derived(row: Measurement) -> Measurement:
    """The row with its figures as its samples give them; energy, which they do not tell, stays."""
    metrics = metrics_of(row.samples, row.items, throughput=registry.throughput_of(row.workload))
    kept = {name: getattr(row.metrics, name) for name in ("energy_j", "power_w", "energy_source")}
    return replace(row, metrics=replace(metrics, **kept))


@st.composite
def honest_rows(draw: st.DrawFn) -> Measurement:
    """A row as ``derive`` makes it from samples that a device could have taken."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    ranks, batches, size = (draw(st.integers(1, most)) for most in (4, 3, 6))
    warmup, repeats = draw(st.integers(0, 2)), draw(st.integers(1, 5))
    read, most = draw(st.integers(1, 64)), draw(st.integers(1, 32))
    trains, fixed = draw(st.booleans()), draw(st.booleans())
    cut = repeats > 1 and draw(st.booleans())  # by the time limit, in the last repeat
    last = warmup + repeats - 1
    samples: list[tuple[int, Sample]] = []
    items: list[tuple[int, Item]] = []
    for rank, repeat, batch in product(range(ranks), range(last + 1), range(batches)):
        if cut and repeat == last and batch:
            continue
        written = [most if fixed else chance.randint(1, most) for _ in range(size)]
        first_s = chance.uniform(0.01, 0.5)
        steps = [chance.uniform(0.001, 0.1) for _ in range(max(written) - 1)]
        parts = {name: chance.uniform(0.0, 0.2) for name in PARTS}
        inside_s = math.fsum(parts.values()) if trains else first_s + math.fsum(steps)
        wall_s = inside_s + chance.uniform(0.0001, 0.1)
        generated = {"ttft_s": first_s, "step_s": tuple(steps), "output_tokens": sum(written)}
        trained = {**parts, "loss": chance.uniform(0, 12), "output_tokens": 0}
        one = sample(
            repeat=repeat,
            batch=batch,
            warmup=repeat < warmup,
            complete=not (cut and repeat == last),
            wall_s=wall_s,
            cpu_s=wall_s * chance.uniform(0.1, 8),
            items=size,
            input_tokens=size * read,
            computed_tokens=size * (read + most),
            **(trained if trains else generated),
        )
        samples.append((rank, one))
        for number, count in enumerate(written) if not trains and repeat == last - cut else ():
            ids = (*range(10, 9 + count), 2 if count < most else 5) if number < 2 else None
            item = Item(
                index=number,
                input_tokens=read,
                output_tokens=count,
                latency_s=first_s + math.fsum(steps[: count - 1]),
                ttft_s=first_s,
                output_text="x" * count,
                output_ids=ids,
            )
            items.append((rank, item))
    warm = [one.wall_s for rank, one in samples if one.warmup and rank == 0]
    job = {"output_tokens": most, "ignore_eos": fixed, "input_tokens": read}
    row = plain_row(
        samples=tuple(samples),
        items=tuple(items),
        parameters={} if trains else job,
        workload="finetuning" if trains else "text-generation",
        cards=ranks,
        batch_size=size,
        batch_size_requested=str(size),
        details={} if fixed else {"end_token_ids": "2 3"},
        warmup_s=math.fsum(warm),
        started_at=1000.0,
        ended_at=1010.0 + math.fsum(one.wall_s for _, one in samples),
    )
    return derived(row)


# ---------------------------------------------------------------- lies


def scaled(value: Any, factor: float) -> Any:
    if isinstance(value, tuple):
        return tuple(one * factor for one in value)
    return None if value is None else type(value)(value * factor)


def figures(**factors: float) -> Lie:
    return lambda row: stored(**{n: getattr(row.metrics, n) * by for n, by in factors.items()})(row)


def stored(**values: Any) -> Lie:
    return lambda row: replace(row, metrics=replace(row.metrics, **values))


def columns(**factors: float) -> Lie:
    return lambda row: replace(row, **{n: scaled(getattr(row, n), f) for n, f in factors.items()})


def replaced(**values: Any) -> Lie:
    return lambda row: replace(row, **values)


def samples(**changes: Any) -> Lie:
    """Change each sample by factors or functions, and derive the figures anew: the lie was told
    when it was measured."""
    return _of_raw("samples", changes)


def items(**changes: Any) -> Lie:
    return _of_raw("items", changes)


def _of_raw(raw: str, changes: Mapping[str, Any]) -> Lie:
    def change(one: Any) -> Any:
        return replace(
            one,
            **{
                n: c(one) if callable(c) else scaled(getattr(one, n), c) for n, c in changes.items()
            },
        )

    def lie(row: Measurement) -> Measurement:
        pairs = tuple((rank, change(one)) for rank, one in getattr(row, raw))
        return derived(replace(row, **{raw: pairs}))

    return lie


def first(**changes: Any) -> Lie:
    """Change the first prompt alone."""

    def lie(row: Measurement) -> Measurement:
        (rank, item), *others = row.items
        return replace(row, items=((rank, replace(item, **changes)), *others))

    return lie


def without(raw: str, place: int) -> Lie:
    def lie(row: Measurement) -> Measurement:
        pairs = list(getattr(row, raw))
        del pairs[place]
        return replace(row, **{raw: tuple(pairs)})

    return lie


def told(**details: str) -> Lie:
    return lambda row: replace(row, details={**row.details, **details})


def both(*lies: Lie) -> Lie:
    def lie(row: Measurement) -> Measurement:
        for one in lies:
            row = one(row)
        return row

    return lie


def timed_by(factor: float) -> Lie:
    """A clock that runs wrong: all times of samples and prompts by a factor, and all figures."""
    times = ("wall_s", "cpu_s", "ttft_s", "step_s", *PARTS, "communication_s")
    of_samples = samples(**dict.fromkeys(times, factor))
    slower = both(of_samples, items(latency_s=factor, ttft_s=factor))

    def lie(row: Measurement) -> Measurement:
        changed = slower(row)
        energy_j, measure_s = changed.metrics.energy_j, changed.metrics.measure_s or 1.0
        return stored(power_w=None if energy_j is None else energy_j / measure_s)(changed)

    return lie


def ran_for(factor: float) -> Lie:
    """The attempt's own start and end, ``factor`` of what they were apart."""
    return lambda row: replace(
        row, ended_at=(row.started_at or 0) + factor * ((row.ended_at or 0) - (row.started_at or 0))
    )


RATES = {"generated_tokens_per_s": 2, "throughput": 2, "throughput_high": 2}
PROCESSOR = {"emulated": True, "peak_device_memory_bytes": None, "threads": 1, "precision": "fp32"}
DOUBLE_TOKENS = both(samples(output_tokens=2), items(output_tokens=2))
DOUBLE_LENGTH = both(samples(input_tokens=2), items(input_tokens=2))
EARLY = both(samples(ttft_s=lambda _: 1e-3), items(ttft_s=lambda _: 1e-3))
UNTOLD_STEPS = both(samples(step_s=lambda _: ()), timed_by(0.1))
IDS = tuple(range(100, 227))
ENDED = both(first(output_ids=(*IDS[:120], 7, *IDS[120:])), told(end_token_ids="7 9"))
TOO_MANY_READ = samples(input_tokens=lambda s: 3 * s.computed_tokens)
FP32 = both(timed_by(0.5), replaced(precision="fp32"))

#: By the honest row in which it is planted: the lie, and words of the reason that it is caught for.
_LIES: dict[Callable[[], Measurement], dict[str, tuple[Lie, str]]] = {
    generation: {
        # tokens and prompts
        "generated tokens doubled in the rate": (figures(**RATES), "only|samples give"),
        "throughput alone": (figures(throughput=1.2, throughput_high=1.2), "throughput is"),
        "total tokens below generated ones": (figures(total_tokens_per_s=0.4), "only"),
        "total tokens too many": (figures(total_tokens_per_s=1.5), "total_tokens_per_s is"),
        "prompts counted twice": (figures(items_per_s=2.0), "items_per_s is"),
        "samples count double tokens": (samples(output_tokens=2), "generated 8,192 tokens|counts"),
        "samples count padding as read": (samples(input_tokens=2), "counts"),
        "twice the length read, by prompts too": (DOUBLE_LENGTH, "prompts with 128 each"),
        "samples count more prompts": (samples(items=2), "counts"),
        "longer prompts": (items(output_tokens=lambda i: i.output_tokens + 1), "counts|asked for"),
        "prompts that read more": (items(input_tokens=lambda i: i.input_tokens + 1), "counts"),
        "tokens beyond those asked for": (DOUBLE_TOKENS, "for 32 prompts of 128 each"),
        "a prompt was left out": (without("items", 0), "prompts have|its prompts give"),
        "a long text of few tokens": (first(output_text="x" * 100_000), "a text of 100,000 bytes"),
        "a token without an id": (first(output_ids=IDS), "counts as 128 tokens, and has 127 ids"),
        "tokens after the end of a text": (ENDED, "counts as 128 tokens, and ended after 121"),
        "fewer positions than tokens": (samples(computed_tokens=1 / 4), "the device worked on"),
        "another batch size than asked for": (columns(batch_size=2), "was asked for"),
        # speeds against the card
        "ten times as fast by a slow clock": (timed_by(0.05), "of weights takes"),
        "decoding of too many positions": (samples(computed_tokens=1_000), "of the bf16 peak"),
        "an emulated card that is no processor": (replaced(**PROCESSOR), "a core decoded"),
        "weights of a tenth of a byte": (columns(weight_bytes=1 / 20), "B each"),
        "weights of many bytes": (columns(weight_bytes=8), "of weights takes|B each"),
        "parameters beyond the weights": (columns(parameter_count=30), "peak|B each"),
        # parts of times
        "steps longer than their batch": (samples(step_s=2), "the steps of a batch took"),
        "a late first token": (samples(ttft_s=lambda s: 2 * s.wall_s), "steps of a batch|only"),
        "a batch much longer than its steps": (samples(wall_s=5), "its first token and steps"),
        "a batch that took no time": (samples(wall_s=lambda _: -1.0), "a batch took"),
        "a prompt later than its batch": (items(latency_s=3), "a prompt took"),
        "prompts faster than their steps": (items(latency_s=0.5), "at the fastest step"),
        "a first token after all": (items(ttft_s=lambda i: 2 * i.latency_s), "first token took"),
        "a shorter timed part": (figures(measure_s=0.5), "measure_s is"),
        "less time of the processor": (figures(cpu_s=0.1), "cpu_s is"),
        "more seconds than the attempt had": (ran_for(0.5), "loading, warm-up and timed part"),
        "an end before the start": (ran_for(-1.0), "loading, warm-up and timed part"),
        "a load longer than the attempt": (replaced(load_s=500.0), "loading, warm-up"),
        "a warm-up shorter than its batches": (columns(warmup_s=1 / 3), "warm-up took"),
        # percentiles and intervals
        "time per token, halved": (figures(tpot_p50_s=0.5), "tpot_p50_s is"),
        "percentiles out of order": (figures(tpot_p50_s=50.0), "only"),
        "a slow tail left out": (stored(tpot_p99_s=None, tpot_p95_s=1e-9), "only"),
        "latency of another run": (figures(latency_p50_s=0.7), "latency_p50_s is"),
        "an interval without the figure": (figures(throughput_low=3.0), "only"),
        "too tight an interval": (figures(relative_half_width=0.01), "relative_half_width is"),
        "numbers that no column admits": (told(**{OUT_OF_RANGE: "throughput=inf"}), "cannot be"),
        # energy
        "energy of half the timed part": (figures(energy_j=0.5), "its energy is that of"),
        "energy beyond the attempt": (figures(energy_j=40.0), "its energy is that of"),
        "a thousandth of the joules": (figures(energy_j=1e-3, power_w=1e-3), "drew"),
        "power beyond the card's limit": (figures(energy_j=10.0, power_w=10.0), "drew"),
    },
    slow: {
        "repeats that never were": (stored(repeats=9), "counts 9 repeats"),
        "decoding beyond the memory's bandwidth": (timed_by(0.2), "of weights takes"),
        "a first token before the weights were read": (EARLY, "a first token took"),
        "steps of which none was told": (UNTOLD_STEPS, "of weights"),
        "a longer timed part": (figures(measure_s=2.0), "measure_s is"),
        "time to first token, halved": (figures(ttft_s=0.5), "ttft_s is"),
    },
    continuous: {"samples that were left out": (without("samples", -1), "samples")},
    training: {
        "real tokens beyond positions": (TOO_MANY_READ, "the device worked on"),
        "training beyond the arithmetic's peak": (timed_by(0.2), "of the bf16 peak"),
        "steps of too many positions": (samples(computed_tokens=40), "of the bf16 peak"),
        "fp32 at the speed of bf16": (FP32, "of the fp32 peak"),
        "more memory than it has": (
            replaced(peak_device_memory_bytes=90 * 2**30),
            "were allocated",
        ),
        "parts beyond the step": (samples(backward_s=lambda s: s.wall_s), "parts of a step"),
        "a wait": (samples(communication_s=lambda s: 2 * s.wall_s), "parts of a step"),
        "loss of another training": (figures(loss_last=0.5), "loss_last is"),
    },
}
#: Name of the lie, the row in which it is planted, the lie, and words of the reason.
LIES = [(name, row, *lie) for row, lies in _LIES.items() for name, lie in lies.items()]
