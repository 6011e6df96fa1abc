"""Rows that are as honest as ``derive`` makes them, to test the gate with."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st
from measurements import row as plain_row
from planted_lies import derived

from orchestrator.core.measurement import Measurement
from workloads.base import Item, Sample


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
                                output_ids=(
                                    (*range(10, 9 + count), 2 if count < most else 5)
                                    if n < 2
                                    else None
                                ),
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
        details={} if fixed else {"end_token_ids": "2 3"},
        warmup_s=warm_s,
        started_at=1000.0,
        ended_at=1000.0 + spent_s + 10.0,
    )
    return derived(base)
