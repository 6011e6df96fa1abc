"""The gate: planted lies are caught with figure and limit, and honest rows pass."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurement_factory import every_state, large_run
from measurements import row as plain_row
from planted_lies import (
    LIES,
    Lie,
    continuous,
    derived,
    generation,
    rows_of_the_card,
    stored,
    times,
    training,
)

from orchestrator.domain.measurement import Measurement
from orchestrator.report.flags import FLAGS
from orchestrator.report.flags.possible import contradictions
from orchestrator.report.reference_data import reference
from orchestrator.report.roofline import roofline_of
from workloads.api import Item, Sample

NAMES = [name for name, *_ in LIES]


@pytest.mark.parametrize(("make", "lie", "words"), [lie[1:] for lie in LIES], ids=NAMES)
def test_a_planted_lie_is_caught(make: Callable[[], Measurement], lie: Lie, words: str) -> None:
    """The row passes, and with the lie it is suspect for a reason that names the figure."""
    assert FLAGS["suspect"].reason(make()) is None
    found = list(contradictions(lie(make())))
    assert any(word in reason for reason in found for word in words.split("|")), found


def test_there_are_at_least_fifty_lies() -> None:
    """All of them are told apart by name."""
    assert len(set(NAMES)) == len(LIES) >= 50


def test_an_unknown_card_has_no_limits_and_no_share_of_them() -> None:
    """A card without a data sheet has no MFU; nothing is flagged for what is not known."""
    fast = replace(times(training(), 0.2), device_name="A card of next year", started_at=None)
    assert list(contradictions(fast)) == []
    roofline = roofline_of([fast], reference().devices)
    assert roofline.shares == () and roofline.unknown == ("A card of next year",)
    assert list(contradictions(replace(fast, device_name=None))) == []


def test_facts_that_are_not_known_never_flag() -> None:
    """Taking any fact away from an honest row leaves it honest."""
    names = [n for n in generation().metrics.__dataclass_fields__ if n != "repeats"]
    for row in (generation(), training(), continuous()):
        for name in names:
            blank = "" if name == "throughput_unit" else None
            assert not list(contradictions(stored(**{name: blank})(row))), name
        for name in (
            "weight_bytes",
            "parameter_count",
            "load_s",
            "warmup_s",
            "started_at",
            "threads",
            "peak_device_memory_bytes",
            "train_flops_per_token",
            "device_name",
        ):
            assert not list(contradictions(replace(row, **{name: None}))), name
        assert not list(contradictions(replace(row, samples=(), items=())))


# ---------------------------------------------------------------- honest rows


@st.composite
def honest_rows(draw: st.DrawFn) -> Measurement:
    """A row as ``derive`` makes it from samples that a device could have taken."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    ranks, batches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    warmup, repeats = draw(st.integers(0, 2)), draw(st.integers(1, 5))
    trains, cut = draw(st.booleans()), draw(st.booleans())
    fixed = draw(st.booleans())
    read, most = draw(st.integers(1, 64)), draw(st.integers(1, 32))
    size = draw(st.integers(1, 6))
    made: list[tuple[int, Sample]] = []
    prompts: list[tuple[int, Item]] = []
    spent_s = warm_s = 0.0
    for rank in range(ranks):
        for repeat in range(warmup + repeats):
            for batch in range(batches):
                last = repeat == warmup + repeats - 1
                if cut and repeats > 1 and last and batch:
                    continue
                written = [most if fixed else chance.randint(1, most) for _ in range(size)]
                first_s = chance.uniform(0.01, 0.5)
                steps = [chance.uniform(0.001, 0.1) for _ in range(max(written) - 1)]
                parts = [chance.uniform(0.0, 0.2) for _ in range(4)]
                inside_s = math.fsum(parts) if trains else first_s + math.fsum(steps)
                wall_s = inside_s + chance.uniform(0.0001, 0.1)
                whole = not (cut and repeats > 1 and last)
                made.append(
                    (
                        rank,
                        Sample(
                            repeat=repeat,
                            batch=batch,
                            warmup=repeat < warmup,
                            complete=whole,
                            wall_s=wall_s,
                            cpu_s=wall_s * chance.uniform(0.1, 8),
                            items=size,
                            input_tokens=size * read,
                            output_tokens=0 if trains else sum(written),
                            computed_tokens=size * (read + most),
                            ttft_s=None if trains else first_s,
                            step_s=() if trains else tuple(steps),
                            loss=chance.uniform(0, 12) if trains else None,
                            **(
                                dict(
                                    zip(
                                        ("data_s", "forward_s", "backward_s", "optimizer_s"),
                                        parts,
                                        strict=True,
                                    )
                                )
                                if trains
                                else {}
                            ),
                        ),
                    )
                )
                spent_s += wall_s
                warm_s += wall_s if repeat < warmup and rank == 0 else 0.0
                counted = warmup + repeats - (2 if cut and repeats > 1 else 1)
                if not trains and repeat == counted:
                    prompts += [
                        (
                            rank,
                            Item(
                                index=n,
                                input_tokens=read,
                                output_tokens=count,
                                latency_s=first_s + math.fsum(steps[: count - 1]),
                                ttft_s=first_s,
                                output_text="x" * count,
                            ),
                        )
                        for n, count in enumerate(written)
                    ]
    job = {"output_tokens": most, "ignore_eos": fixed, "input_tokens": read}
    base = plain_row(
        samples=tuple(made),
        items=tuple(prompts),
        parameters={} if trains else job,
        workload="finetuning" if trains else "text-generation",
        cards=ranks,
        batch_size=size,
        batch_size_requested=str(size),
        warmup_s=warm_s,
        started_at=1000.0,
        ended_at=1000.0 + spent_s + 10.0,
    )
    return derived(base)


@settings(max_examples=150, deadline=None)
@given(honest_rows())
def test_an_honest_row_passes(row: Measurement) -> None:
    """Whatever ranks, batches, repeats and lengths, cut by the time limit or not."""
    assert list(contradictions(row)) == []


def test_a_thousand_clean_rows_raise_no_alarm() -> None:
    """Those of a real card, and the nights that other tests of the report are made of."""
    night = [*every_state(), *every_state(emulated=False), *large_run(900)]
    clean = [*rows_of_the_card(), *night]
    assert len(clean) >= 1000
    alarms = {row.attempt_id: found for row in clean if (found := list(contradictions(row)))}
    assert alarms == {}
