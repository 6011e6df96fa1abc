"""The Pareto front, what each technique buys, and scaling over cards."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurement_factory import Night, a_job, precision_grid, with_interval

from orchestrator.analysis.effects import baseline, effects_of, scalings_of
from orchestrator.analysis.rankings import fronts_of, latency, pareto, throughput
from orchestrator.analysis.selection import settings_of
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import MAX, State
from orchestrator.core.measurement import Measurement
from orchestrator.report.charts import LABEL_CHARACTERS, effects_chart

ONE = Night().add(a_job())


def with_rate(
    row: Measurement, value: float, half: float = 1.0, latency_s: float = 1.0
) -> Measurement:
    return with_interval(row, value, half, latency_p50_s=latency_s, latency_p95_s=latency_s)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=25))
def test_the_front_holds_exactly_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    rows = [with_rate(ONE, float(rate), latency_s=float(wait)) for rate, wait in points]
    front = pareto(rows)
    told = {(throughput(row), latency(row)) for row in front}
    assert len(told) == len(front)

    def beaten(row: Measurement) -> bool:
        return any(
            throughput(other) >= throughput(row)
            and latency(other) <= latency(row)
            and (throughput(other), latency(other)) != (throughput(row), latency(row))
            for other in rows
        )

    for row in rows:
        assert beaten(row) is ((throughput(row), latency(row)) not in told)
    assert [latency(row) for row in front] == sorted(latency(row) for row in front)


def test_fronts_never_mix_devices_or_work() -> None:
    night = Night(emulated=False)
    precision_grid(night, sizes=(1, 8), precisions=("bf16",))
    precision_grid(night, sizes=(1, 8), precisions=("bf16",), cards=4)
    night.add(a_job(dataset="english-prompts"))
    fronts = fronts_of(night.rows, settings_of(night.rows))
    assert [front.setting.cards for front in fronts] == [1, 4]


def effects(rows: list[Measurement]) -> dict[tuple[str, str, str, str], float]:
    found = effects_of(rows, settings_of(rows))
    return {
        (dict(e.setting.parameters)["method"], e.name, e.before, e.after): round(e.ratio.value, 6)
        for e in found
    }


def finetuning(**parameters: object) -> dict[str, object]:
    known = {"method": "lora", "padding": "dynamic", "gradient_checkpointing": False, "steps": 20}
    merged = {**known, **parameters}
    return {"workload": "finetuning", "parameters": tuple(sorted(merged.items()))}


def test_effects_are_rows_that_differ_in_one_setting() -> None:
    night = Night()
    rows = [
        with_rate(night.add(a_job(**finetuning())), 100.0),
        with_rate(night.add(a_job(**finetuning(padding="packing"))), 170.0),
        with_rate(night.add(a_job(**finetuning(gradient_checkpointing=True))), 70.0),
        with_rate(night.add(a_job(**finetuning(method="full"))), 67.0),
        with_rate(night.add(a_job(**finetuning(method="full", padding="packing"))), 120.0),
        with_rate(night.add(a_job(**finetuning(), precision="fp32")), 45.0),
        with_rate(night.add(a_job(**finetuning(steps=40))), 99.0),
    ]
    assert effects(rows) == {
        ("lora", "padding", "dynamic", "packing"): 1.7,
        ("lora", "gradient_checkpointing", "false", "true"): 0.7,
        ("lora", "precision", "bf16", "fp32"): 0.45,
        ("full", "padding", "dynamic", "packing"): 1.791045,
    }


def test_an_effect_is_the_geometric_mean_over_batch_sizes() -> None:
    night = Night()
    rows = []
    for batch, (plain, packed) in {8: (100.0, 200.0), 16: (100.0, 800.0)}.items():
        rows.append(with_rate(night.add(a_job(**finetuning(), batch_size=batch)), plain))
        job = a_job(**finetuning(padding="packing"), batch_size=batch)
        rows.append(with_rate(night.add(job), packed))
    (effect,) = effects_of(rows, settings_of(rows))
    assert effect.ratio.value == pytest.approx(4.0)
    assert [pair.row.batch_size for pair in effect.pairs] == [8, 16]
    assert effect.ratio.decided and effect.ratio.low is not None and effect.ratio.low < 4.0


def test_an_effect_within_noise_is_not_decided() -> None:
    night = Night()
    rows = [
        with_rate(night.add(a_job(**finetuning())), 100.0, half=20.0),
        with_rate(night.add(a_job(**finetuning(padding="packing"))), 104.0, half=20.0),
    ]
    (effect,) = effects_of(rows, settings_of(rows))
    assert not effect.ratio.decided


def test_the_baseline_is_the_default_or_else_the_commonest() -> None:
    seen = [{"a": a, "b": b} for a, b in ("10", "00", "20", "01")]
    assert baseline(seen, {"a": "0", "b": "0"}) == {"a": "0", "b": "0"}
    assert baseline(seen, {"a": "2", "b": "1"}) == {"a": "2", "b": "1"}
    assert baseline(seen, {"a": "3", "b": "1"}, share=0.5) == {"a": "0", "b": "0"}


def test_each_experiment_has_a_baseline_of_its_own() -> None:
    night = Night()
    rows = []
    for experiment, batching, factor in (("plain", "static", 1.0), ("other", "continuous", 1.5)):
        for precision, rate in (("bf16", 100.0), ("fp32", 60.0), ("int8", 30.0)):
            parameters = (("batching", batching), ("output_tokens", 128))
            job = a_job(experiment=experiment, precision=precision, parameters=parameters)
            rows.append(with_rate(night.add(job), rate * factor))
    found = {
        (e.name, e.before, e.after, e.label_setting.parameters)
        for e in effects_of(rows, settings_of(rows))
    }
    there = (("batching", "continuous"),)
    assert found == {
        ("precision", "bf16", "fp32", ()),
        ("precision", "bf16", "int8", ()),
        ("precision", "bf16", "fp32", there),
        ("precision", "bf16", "int8", there),
        ("batching", "static", "continuous", ()),
    }


def test_a_change_that_needs_another_is_compared_with_that_alone() -> None:
    """Compilation was measured with a fixed length only: it is held against that length."""
    night = Night()
    rows = [
        with_rate(night.add(a_job(**finetuning(**changes))), rate)
        for changes, rate in (
            ({}, 100.0),
            ({"padding": "fixed"}, 70.0),
            ({"padding": "fixed", "torch_compile": True}, 105.0),
            ({"padding": "packing", "attention": "eager", "torch_compile": True}, 500.0),
        )
    ]
    assert effects(rows) == {
        ("lora", "padding", "dynamic", "fixed"): 0.7,
        ("lora", "torch_compile", "false", "true"): 1.5,
    }


def test_a_default_that_hardly_any_row_has_is_no_baseline() -> None:
    night = Night()
    told = [finetuning(optimizer=one) for one in ("adamw", "adafactor", "adamw-fused")]
    rows = [with_rate(night.add(a_job(**one, precision="fp32")), 100.0) for one in told]
    rows.append(with_rate(night.add(a_job(**told[0])), 200.0))
    assert set(effects(rows)) == {
        ("lora", "optimizer", "adamw", "adafactor"),
        ("lora", "optimizer", "adamw", "adamw-fused"),
        ("lora", "precision", "fp32", "bf16"),
    }


def test_scaling_tells_speedup_and_efficiency() -> None:
    night = Night()
    rows = [
        with_rate(night.add(a_job(cards=cards)), rate)
        for cards, rate in ((1, 100.0), (2, 180.0), (4, 300.0))
    ]
    (scaling,) = scalings_of(rows, settings_of(rows))
    assert [round(step.speedup.value, 3) for step in scaling.steps] == [1.0, 1.8, 3.0]
    assert [round(step.efficiency, 3) for step in scaling.steps] == [1.0, 0.9, 0.75]


def test_scaling_compares_equal_batches_only() -> None:
    night = Night()
    rows = [
        night.add(a_job(cards=1, batch_size=MAX), batch_size=64),
        night.add(a_job(cards=2, batch_size=MAX), batch_size=32),
        night.add(a_job(cards=2, precision="fp32"), State.OUT_OF_MEMORY),
    ]
    assert scalings_of(rows, settings_of(rows)) == ()


def test_effects_do_not_explode_on_a_full_factorial() -> None:
    night = Night()
    rows = [
        with_rate(night.add(a_job(**finetuning(padding=p, gradient_checkpointing=g))), 100.0)
        for p in ("dynamic", "packing", "fixed")
        for g in (False, True)
    ]
    assert len(summarize(rows).effects) == 3


def test_an_effect_tells_real_tokens_apart_from_samples() -> None:
    night = Night()
    plain = night.add(a_job(**finetuning()))
    packed = night.add(a_job(**finetuning(padding="packing")))
    rows = [
        replace(row, metrics=replace(row.metrics, total_tokens_per_s=tokens))
        for row, tokens in ((with_rate(plain, 10.0), 500.0), (with_rate(packed, 12.0), 900.0))
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
            rows.append(with_rate(night.add(job), rate))
    found = effects_of(rows, settings_of(rows))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", effects_chart(found, "Techniques"))
    told = " ".join(texts)
    assert len(found) == 2
    assert "precision bf16 → fp32 · output tokens 64" in told
    assert "precision bf16 → fp32 · output tokens 256" in told
    assert max(map(len, texts)) <= LABEL_CHARACTERS
