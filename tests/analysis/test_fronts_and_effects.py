"""The Pareto front, what each technique buys, and scaling over cards."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurement_factory import Night, a_job, precision_grid, with_interval
from planted_lies import rows_of_the_card

from orchestrator.analysis.effects import effects_of, scalings_of
from orchestrator.analysis.rankings import fronts_of
from orchestrator.analysis.selection import settings_of
from orchestrator.analysis.summary import Summary, summarize
from orchestrator.core.job import MAX, State
from orchestrator.core.measurement import Measurement
from orchestrator.report.charts import LABEL_CHARACTERS, effects_chart
from workloads.util.statistics import pareto


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=25))
def test_the_front_holds_exactly_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    front = pareto(points, lambda point: point)
    assert front == sorted(set(front), reverse=True)
    for x, y in points:
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)
        assert beaten is ((x, y) not in front)


def test_fronts_never_mix_devices_or_work() -> None:
    night = Night(emulated=False)
    precision_grid(night, sizes=(1, 8), precisions=("bf16",))
    precision_grid(night, sizes=(1, 8), precisions=("bf16",), cards=4)
    night.add(a_job(dataset="english-prompts"))
    fronts = fronts_of(night.rows, settings_of(night.rows))
    assert [front.setting.cards for front in fronts] == [1, 4]


# ---------------------------------------------------------------- techniques

DEFAULTS = {"method": "lora", "padding": "dynamic", "gradient_checkpointing": False, "steps": 20}
_Effects = dict[tuple[str, str, str, str], float]


def tuned(rate: float, half: float = 1.0, **changes: object) -> Measurement:
    """A row of fine-tuning with these fields of the job and parameters, others at defaults."""
    fields = {n: changes.pop(n) for n in ("precision", "batch_size") if n in changes}
    parameters = tuple(sorted({**DEFAULTS, **changes}.items()))
    job = a_job(workload="finetuning", parameters=parameters, **fields)
    return with_interval(Night().add(job), rate, half)


def effects(rows: list[Measurement]) -> _Effects:
    """Ratios by method, name and the values before and after."""
    return {
        (dict(e.setting.parameters)["method"], e.name, e.before, e.after): round(e.ratio.value, 6)
        for e in effects_of(rows, settings_of(rows))
    }


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            [
                tuned(100),
                tuned(170, padding="packing"),
                tuned(70, gradient_checkpointing=True),
                tuned(67, method="full"),
                tuned(120, method="full", padding="packing"),
                tuned(45, precision="fp32"),
                tuned(99, steps=40),
            ],
            {
                ("lora", "padding", "dynamic", "packing"): 1.7,
                ("lora", "gradient_checkpointing", "false", "true"): 0.7,
                ("lora", "precision", "bf16", "fp32"): 0.45,
                ("full", "padding", "dynamic", "packing"): 1.791045,
            },
            id="one change each, none across work",
        ),
        pytest.param(
            [
                tuned(100),
                tuned(70, padding="fixed"),
                tuned(105, padding="fixed", torch_compile=True),
                tuned(500, padding="packing", attention="eager", torch_compile=True),
            ],
            {
                ("lora", "padding", "dynamic", "fixed"): 0.7,
                ("lora", "torch_compile", "false", "true"): 1.5,
            },
            id="compilation, measured with a fixed length only, is held against that length",
        ),
        pytest.param(
            [
                *(tuned(100, optimizer=o, precision="fp32") for o in ("adamw", "adafactor")),
                tuned(100, optimizer="adamw-fused", precision="fp32"),
                tuned(200, optimizer="adamw"),
            ],
            {
                ("lora", "optimizer", "adamw", "adafactor"): 1.0,
                ("lora", "optimizer", "adamw", "adamw-fused"): 1.0,
                ("lora", "precision", "fp32", "bf16"): 2.0,
            },
            id="a default that hardly any row has is no baseline",
        ),
        pytest.param(
            [
                tuned(100, padding=p, gradient_checkpointing=g)
                for p in ("dynamic", "packing", "fixed")
                for g in (False, True)
            ],
            {
                ("lora", "padding", "dynamic", "packing"): 1.0,
                ("lora", "padding", "dynamic", "fixed"): 1.0,
                ("lora", "gradient_checkpointing", "false", "true"): 1.0,
            },
            id="a full factorial does not explode",
        ),
        pytest.param(
            [
                tuned(rate, method="full", strategy=name)
                for name, rate in (("ddp", 100), ("fsdp2", 80), ("pipeline", 140))
            ],
            {
                ("full", "strategy", "ddp", "fsdp2"): 0.8,
                ("full", "strategy", "ddp", "pipeline"): 1.4,
            },
            id="layouts over cards",
        ),
    ],
)
def test_effects_are_rows_that_differ_in_one_setting(
    rows: list[Measurement], expected: _Effects
) -> None:
    assert effects(rows) == expected


def test_an_effect_is_the_geometric_mean_over_batch_sizes() -> None:
    rows = []
    for batch, packed in ((8, 200.0), (16, 800.0)):
        rows += [tuned(100, batch_size=batch), tuned(packed, batch_size=batch, padding="packing")]
    (effect,) = effects_of(rows, settings_of(rows))
    assert effect.ratio.value == pytest.approx(4.0)
    assert [pair.row.batch_size for pair in effect.pairs] == [8, 16]
    assert effect.ratio.decided and effect.ratio.low is not None and effect.ratio.low < 4.0
    noisy = [tuned(100, half=20), tuned(104, half=20, padding="packing")]
    assert not effects_of(noisy, settings_of(noisy))[0].ratio.decided


def test_each_experiment_has_a_baseline_of_its_own() -> None:
    night = Night()
    rows = []
    for experiment, batching, factor in (("plain", "static", 1.0), ("other", "continuous", 1.5)):
        for precision, rate in (("bf16", 100.0), ("fp32", 60.0), ("int8", 30.0)):
            parameters = (("batching", batching), ("output_tokens", 128))
            job = a_job(experiment=experiment, precision=precision, parameters=parameters)
            rows.append(with_interval(night.add(job), rate * factor, 1.0))
    there = (("batching", "continuous"),)
    assert {
        (e.name, e.before, e.after, e.label_setting.parameters)
        for e in effects_of(rows, settings_of(rows))
    } == {
        ("precision", "bf16", "fp32", ()),
        ("precision", "bf16", "int8", ()),
        ("precision", "bf16", "fp32", there),
        ("precision", "bf16", "int8", there),
        ("batching", "static", "continuous", ()),
    }


def test_an_effect_tells_real_tokens_apart_from_samples() -> None:
    rows = [
        replace(row, metrics=replace(row.metrics, total_tokens_per_s=tokens))
        for row, tokens in ((tuned(10), 500.0), (tuned(12, padding="packing"), 900.0))
    ]
    (effect,) = effects_of(rows, settings_of(rows))
    assert effect.ratio.value == pytest.approx(1.2)
    assert effect.token_ratio == pytest.approx(1.8)
    unknown = [replace(rows[0], metrics=replace(rows[0].metrics, total_tokens_per_s=None)), rows[1]]
    (effect,) = effects_of(unknown, settings_of(unknown))
    assert effect.token_ratio is None


def test_bars_of_one_change_in_several_settings_are_labelled_apart() -> None:
    night = Night()
    rows = []
    for tokens in (64, 256):
        for precision, rate in (("bf16", 100.0), ("fp32", 60.0)):
            parameters = (("output_tokens", tokens),)
            job = a_job(precision=precision, parameters=parameters, dataset="english-prompts")
            rows.append(with_interval(night.add(job), rate, 1.0))
    both = effects_of(rows, settings_of(rows))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", effects_chart(both, "Techniques"))
    assert len(both) == 2 and max(map(len, texts)) <= LABEL_CHARACTERS
    for tokens in (64, 256):
        assert f"precision bf16 → fp32 · output tokens {tokens}" in " ".join(texts)


# ---------------------------------------------------------------- techniques on an H100


@cache
def on_the_card(run: str) -> Summary:
    return summarize([row for row in rows_of_the_card() if row.run == run])


def test_every_pair_differs_in_one_choice() -> None:
    for run in {row.run for row in rows_of_the_card()}:
        for effect in on_the_card(run).effects:
            for pair in effect.pairs:
                one = {**pair.row.parameters, "precision": pair.row.precision}
                other = {**pair.base.parameters, "precision": pair.base.precision}
                assert [n for n in one if one[n] != other[n]] == [effect.name]
                assert pair.row.batch_size_requested == pair.base.batch_size_requested


# ---------------------------------------------------------------- several cards


def test_scaling_tells_speedup_and_efficiency_of_equal_batches_only() -> None:
    rates = {1: 100.0, 2: 180.0, 4: 300.0}
    rows = [with_interval(Night().add(a_job(cards=n)), rate, 1.0) for n, rate in rates.items()]
    (scaling,) = scalings_of(rows, settings_of(rows))
    assert [round(step.speedup.value, 3) for step in scaling.steps] == [1.0, 1.8, 3.0]
    assert [round(step.efficiency, 3) for step in scaling.steps] == [1.0, 0.9, 0.75]
    night = Night()  # batches that a search found are unequal
    rows = [
        night.add(a_job(cards=1, batch_size=MAX), batch_size=64),
        night.add(a_job(cards=2, batch_size=MAX), batch_size=32),
        night.add(a_job(cards=2, precision="fp32"), State.OUT_OF_MEMORY),
    ]
    assert scalings_of(rows, settings_of(rows)) == ()
