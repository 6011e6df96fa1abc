"""Declared figures: of ranks, in rows, in comparisons, and from rows of an earlier version."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

import pytest
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from measurements import attempt, from_table, job, rank, recorded, row

from orchestrator.analysis.measurement import measurement_of
from orchestrator.analysis.metrics import FigureChange, figure_changes, figures_of
from orchestrator.analysis.samples import derived_figures, metrics_of
from orchestrator.core.events import RecordRow
from orchestrator.core.measurement import Measurement
from orchestrator.store.codec import to_table
from workloads import registry
from workloads.base import Item, Metric, Result, Throughput, Timed, of_ranks
from workloads.registry import METRICS, WORKLOADS

DECLARED = {
    way: Metric(name=way, title=way, description=way, ranks=way)  # type: ignore[arg-type]
    for way in ("mean", "largest", "smallest", "sum")
}


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5))
def test_figures_of_ranks_become_one_as_declared(values: list[float]) -> None:
    found = of_ranks(DECLARED, [dict.fromkeys((*DECLARED, "other"), value) for value in values])
    assert found["smallest"] == min(values) and found["largest"] == max(values)
    assert found["smallest"] - 1e-9 <= found["mean"] <= found["largest"] + 1e-9
    assert found["sum"] == pytest.approx(math.fsum(values))
    assert found["other"] == found["mean"]  # nobody declares it


def record_of(*metrics: dict[str, float], workload: str = "text-generation") -> RecordRow:
    asked = replace(job(cards=len(metrics)), workload=workload)
    tried = attempt(asked, cards=len(metrics))
    results = [
        Result(
            samples=tuple(sample(repeat=n, wall_s=2.0, items=10, output_tokens=0) for n in (0, 1)),
            stop_reason="max_repeats",
            metrics=found,
        )
        for found in metrics
    ]
    ranks = [rank(number, result=result) for number, result in enumerate(results)]
    return recorded(tried, *ranks)


def reported(made: Measurement) -> dict[str, float]:
    """The figures of a row that a workload reports: without those derived from samples."""
    return {name: value for name, value in made.workload_metrics.items() if name not in METRICS}


def test_a_row_has_the_figures_of_all_its_ranks() -> None:
    record = record_of(
        {"first_batch_loss_after": 2.0, "largest_logit_difference": 0.5, "compared_tokens": 9},
        {"first_batch_loss_after": 4.0, "largest_logit_difference": 0.1, "compared_tokens": 8},
    )
    made = measurement_of(record, run="r", invocation_id="i", recorded_at=1.0)
    wanted = {
        "first_batch_loss_after": 3.0,
        "largest_logit_difference": 0.5,
        "compared_tokens": 17.0,
    }
    assert reported(made) == wanted
    assert from_table(to_table([made])) == [made]


def test_throughput_is_what_the_workload_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    products = replace(
        WORKLOADS["text-generation"],
        name="products",
        throughput=Throughput(unit="products/s", counts="items"),
    )
    entries = MappingProxyType({**WORKLOADS, "products": products})
    monkeypatch.setattr(registry, "WORKLOADS", entries)
    for workload, unit in (("products", "products/s"), ("not-installed", "samples/s")):
        record = record_of({}, workload=workload)
        made = measurement_of(record, run="r", invocation_id="i", recorded_at=1.0)
        assert (made.metrics.throughput, made.metrics.throughput_unit) == (5.0, unit)
    tokens = [(0, sample(repeat=n, wall_s=2.0, items=10, output_tokens=50)) for n in (0, 1)]
    counted = metrics_of(tokens, throughput=products.throughput)
    assert (counted.throughput, counted.throughput_unit) == (5.0, "products/s")
    assert metrics_of(tokens).throughput == 25.0


def test_rows_of_an_earlier_version_have_their_figures_among_details() -> None:
    old = replace(
        row(1),
        samples=(),
        workload="finetuning",
        details={"first_batch_loss_after": "3.41", "compared_tokens": "18 of 18", "method": "lora"},
    )
    assert old.reported("first_batch_loss_after") == 3.41
    assert old.reported("compared_tokens") is old.reported("method") is None
    assert [(m.name, value) for m, value in figures_of(old)] == [("first_batch_loss_after", 3.41)]
    new = replace(old, workload_metrics={"first_batch_loss_after": 3.0, "own_figure": 7.0})
    assert {metric.title: value for metric, value in figures_of(new)} == {
        "loss after": 3.0,
        "own figure": 7.0,
    }


def test_a_comparison_says_which_way_is_better() -> None:
    before, after = (
        replace(
            row(1),
            samples=(),
            workload="finetuning",
            workload_metrics={"first_batch_loss_after": loss, "first_batch_loss_before": loss},
        )
        for loss in (3.0, 2.0)
    )
    found = {c.metric.name: c.improved for c in figure_changes(before, after)}
    assert found == {"first_batch_loss_after": True, "first_batch_loss_before": None}
    (change,) = (c for c in figure_changes(after, before) if c.improved is False)
    assert str(change) == "loss after: 2.000 → 3.000 (worse)"
    same = FigureChange(metric=change.metric, before=2.0, after=2.001)
    assert same.improved is None


def test_reading_prompts_and_writing_for_each_user_are_told_apart() -> None:
    """By hand: 4 prompts of 50 tokens in 0.5 s, then a token each every 0.2 s."""
    taken = [
        replace(
            sample(repeat=repeat, wall_s=2.3, items=4),
            input_tokens=200,
            output_tokens=40,
            ttft_s=0.5,
            step_s=(0.2,) * 9,
        )
        for repeat in range(2)
    ]
    declared = registry.metrics_of("text-generation")
    figures = derived_figures(declared, [(0, one) for one in taken])
    assert figures["prefill_tokens_per_s"] == pytest.approx(200 / 0.5)
    assert figures["tokens_per_s_per_user"] == pytest.approx(5.0)
    texts = [Item(index=i, input_tokens=50, output_tokens=10, latency_s=2.3) for i in range(4)]
    together = [(0, replace(text, ttft_s=0.5)) for text in texts]
    assert derived_figures(declared, [(0, one) for one in taken], together) == figures
    in_turn = [(0, replace(text, ttft_s=0.2 * (1 + text.index))) for text in texts]  # mean: 0.5
    found = derived_figures(declared, [(0, one) for one in taken], in_turn)
    assert figures.keys() - found.keys() == {"prefill_tokens_per_s"}, "continuous batching"
    silent = [(0, replace(one, ttft_s=None, step_s=())) for one in taken]
    told = {"prefill_tokens_per_s", "tokens_per_s_per_user"}
    assert not told & derived_figures(declared, silent).keys()


PADDING_SHARE = METRICS["padding_share"].figure
assert PADDING_SHARE is not None


@given(lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8))
def test_a_static_batch_pads_to_its_longest_prompt_and_text(lengths: list[tuple[int, int]]) -> None:
    """Prompts are padded to the longest, and ended texts go on with the others; the last token of
    a text is not fed back. Nothing is in vain where all are of one length."""
    prompts, texts = zip(*lengths, strict=True)
    computed = len(lengths) * (max(prompts) + max(texts) - 1)
    vain = sum(max(prompts) - length for length in prompts)
    vain += sum(max(texts) - length for length in texts)
    batch = sample(
        items=len(lengths),
        input_tokens=sum(prompts),
        output_tokens=sum(texts),
        computed_tokens=computed,
    )
    found = PADDING_SHARE(Timed(samples=[batch], items=[]))
    assert found == pytest.approx(vain / computed)
    # A rank that splits the same prompts counts none of them, and changes nothing.
    beside = sample(items=0, input_tokens=0, output_tokens=0, computed_tokens=computed)
    assert PADDING_SHARE(Timed(samples=[batch, beside], items=[])) == found


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ({"input_tokens": 75, "output_tokens": 0, "computed_tokens": 100}, 0.25),  # of training
        ({"computed_tokens": 0}, None),  # an engine that counts no positions
        ({"computed_tokens": 10}, None),  # fewer than are needed
    ],
)
def test_padding_is_known_where_positions_are_counted(tokens, share) -> None:
    assert PADDING_SHARE(Timed(samples=[sample(**tokens)] * 2, items=[])) == share
