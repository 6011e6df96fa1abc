"""Served models: fronts, knees, best settings within limits, costs, and all of them on the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import measurements
import pytest
from command_line import Nightgrid

from orchestrator.analysis.hardware import parse_published
from orchestrator.analysis.selection import settings_of
from orchestrator.analysis.serving import Served, served_of
from orchestrator.analysis.summary import summarize
from orchestrator.core.measurement import Measurement
from orchestrator.grid.vocabulary import PricesBlock
from orchestrator.report import exchange
from orchestrator.report.figure_data import figure_csv
from orchestrator.report.html import render
from orchestrator.report.run_report import read_prices
from orchestrator.report.text import to_markdown
from orchestrator.store.store import Store


def test_every_form_has_the_best_settings_and_the_points_of_served_models() -> None:
    summary = summarize([*SLOW, *WIDE], prices=PricesBlock(card_hour=3.6))
    page = render(summary, summary.rows)
    section = page.partition('id="served-1"')[2].partition("</section>")[0]
    section = section.replace("\N{NO-BREAK SPACE}", " ")
    assert section.count("<svg") == 2 and 'class="front"' in section and 'class="knee"' in section
    for text in ("TTFT ≤ 0.5 s", "no limit", "cost of 1M tokens, EUR", "vllm", "transformers"):
        assert text in section, text
    lines = to_markdown(summary).splitlines()
    (best,) = (line for line in lines if line.startswith("| no limit"))
    assert best.split(" | ")[1:4] == ["transformers cards=1", "16", "420.0"]
    assert "2.381" in best  # 3.6 an hour over 420 tokens/s
    table = figure_csv(summary)["served.csv"].splitlines()
    assert len(table) == 9 and "per_user" in table[0]
    assert len(list(exchange.lines(summary.rows, "vllm-bench"))) == 8


@pytest.mark.parametrize("form", exchange.FORMATS)
def test_a_run_without_served_models_has_no_lines_of_others_and_says_so(
    form: str, nightgrid: Nightgrid, tmp_path: Path
) -> None:
    with Store(tmp_path, "plain") as store:
        store.append(measurements.row(run="plain"))
    printed = nightgrid("report", "plain", "--format", form, "--results", tmp_path)
    assert not printed.out and "plain: no row has a load of a served model" in printed.err


TABLE = """\
engine,model,system,precision,input_tokens,output_tokens,tensor_parallel,data_parallel,cards,\
concurrency,tokens_per_s_per_user,tokens_per_s_per_card
vllm,meta-llama/Llama-3.1-70B,h200_sxm,bf16,1024,1024,1,1,1,4,40,
sglang,meta-llama/Llama-3.1-70B,h200_sxm,bf16,1024,1024,1,1,1,4,,200
sglang,meta-llama/Llama-3.1-70B,h200_sxm,bf16,1024,8192,1,1,1,4,40,200
sglang,meta-llama/Llama-3.1-70B,h200_sxm,bf16,1024,1024,2,1,1,4,40,200
"""


def test_a_users_table_of_served_models_stands_beside_rows_of_the_same_load() -> None:
    row = measurements.row(
        workload="serving",
        model="/models/Llama-3.1-70B",
        precision="bf16",
        parameters={"concurrency": 4, "input_tokens": 1024, "output_tokens": 1024},
        workload_metrics={"tokens_per_s_per_card": 100.0, "tokens_per_s_per_user": 30.0},
        device_name="NVIDIA H200",
        emulated=False,
    )
    figures = parse_published(TABLE, "dump.csv")
    summary = summarize([row], published=figures)
    titles = [(one.title, one.about.unit) for one in summary.published]
    load = "serving: Llama-3.1-70B, input tokens 1024, output tokens 1024, concurrency 4"
    assert titles == [(load, "tokens/s per user"), (load, "tokens/s per card")]
    page = render(summary, summary.rows)
    section = page.partition('id="published"')[2].partition("</section>")[0]
    for text in ("0.75× h200_sxm", "0.50× h200_sxm", "100.0 tokens/s per card", "dump.csv"):
        assert text in section, text
    assert summarize([replace(row, emulated=True)], published=figures).published == ()


@pytest.mark.parametrize(
    ("damage", "words"),
    [(("cards", "boxes"), "no column 'cards'"), (("4,40", "4,x"), "line 2: ")],
)
def test_a_table_that_cannot_be_read_names_the_line(damage: tuple[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_published(TABLE.replace(*damage), "dump.csv")


def test_prices_are_read_from_the_runs_grid(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    assert read_prices(tmp_path) is None
    grid.write_text("name: g\nprices: {card_hour: 2, kwh: 0.3, currency: USD}\n")
    assert read_prices(tmp_path) == PricesBlock(card_hour=2, kwh=0.3, currency="USD")
    for text in ("name: g\n", "prices: {card_hour: dear}\n", "[", "- 1\n"):
        grid.write_text(text)
        assert read_prices(tmp_path) is None


def point(number: int, load: int, rate: float, tpot: float, **changes: Any) -> Measurement:
    """A row of a load: latencies grow with it."""
    figures = {
        "output_tokens_per_s": rate,
        "tokens_per_s_per_user": 1 / tpot,
        "tpot_p50_s": tpot,
        "ttft_p50_s": load / 20,
        "latency_p50_s": load / 10 + 1,
        "latency_p90_s": load / 10 + 2,
    }
    values: dict[str, Any] = {
        "workload": "serving",
        "parameters": {"concurrency": load, "slo": "ttft_s=0.5 tpot_s=0.03", "output_tokens": 64},
        "workload_metrics": figures,
        "device_name": "Gaudi2",
        "emulated": False,
    }
    row = measurements.row(number, **(values | changes))
    return replace(row, metrics=replace(row.metrics, power_w=500.0))


def served(*rows: Measurement, prices: PricesBlock | None = None) -> tuple[Served, ...]:
    return served_of(rows, settings_of(rows, {}), prices)


SLOW = [point(n, 2**n, rate, tpot) for n, (rate, tpot) in enumerate(
    [(100, 0.01), (180, 0.011), (300, 0.014), (400, 0.02), (420, 0.04)]
)]  # fmt: skip
WIDE = [
    point(10 + n, 2**n, rate, tpot, cards=4, engine="vllm")
    for n, (rate, tpot) in enumerate([(600, 0.004), (1000, 0.006), (1200, 0.02)])
]


def test_a_curve_holds_the_loads_of_one_setting_of_servers() -> None:
    (found,) = served(*reversed(SLOW), *WIDE)
    one, four = sorted(found.curves, key=lambda curve: len(curve.points), reverse=True)
    assert [p.load for p in one.points] == [1, 2, 4, 8, 16]
    assert one.load_name == "concurrency" and four.name == "vllm cards=4"
    assert [p.per_card for p in four.points] == [150, 250, 300]
    counted = [  # the number of requests sets no curve apart
        replace(row, parameters=row.parameters | {"requests": 10 * 2**n})
        for n, row in enumerate(SLOW)
    ]
    assert [len(curve.points) for curve in served(*counted)[0].curves] == [len(SLOW)]
    assert served(measurements.row(0)) == (), "a row without a load is no point"


def test_works_and_curves_are_named_by_what_sets_them_apart() -> None:
    rows = [
        point(
            n, 4 * cards, 100 * cards, 0.01, cards=cards, engine="vllm",
            parameters={"concurrency": 4 * cards, "input_tokens": lengths}
            | {"output_tokens": 64, "tensor_parallel": cards},
        )
        for n, (lengths, cards) in enumerate([(8, 1), (8, 2), (32, 1), (32, 2)])
    ]  # fmt: skip
    works = served(*rows)
    assert [one.about for one in works] == ["8 → 64 tokens", "32 → 64 tokens"]
    assert [[curve.name for curve in one.curves] for one in works] == [["cards=1", "cards=2"]] * 2


def test_the_front_is_beaten_by_no_point_and_the_knee_has_the_most_for_its_latency() -> None:
    (found,) = served(*SLOW, *WIDE)
    pairs = [(p.per_card, round(p.per_user or 0)) for p in found.front]
    assert pairs == [(420, 25), (400, 50), (300, 71), (250, 167), (150, 250)]
    (knee,) = (curve.knee for curve in served(*SLOW)[0].curves)
    assert knee is not None and knee.load == 8  # 400 / 1.8 against 300 / 1.4
    assert served(*SLOW[:2])[0].curves[0].knee is None


def test_the_best_setting_is_named_for_each_limit_and_for_all_of_them() -> None:
    (found,) = served(*SLOW, *WIDE)
    best = {one.limits: one.point.per_card if one.point else None for one in found.best}
    assert best == {
        "": 420,
        "TTFT ≤ 0.5 s": 400,
        "TPOT ≤ 0.03 s": 400,
        "TTFT ≤ 0.5 s, TPOT ≤ 0.03 s": 400,
    }
    strict = {"concurrency": 4, "slo": "tpot_s=0.001"}
    (none,) = served(point(0, 4, 100, 0.04, parameters=strict))
    assert none.best[-1].point is None


def test_tokens_cost_the_hours_of_their_cards_and_the_energy() -> None:
    prices = PricesBlock(card_hour={"gaudi2": 2.0, "default": 9.0}, kwh=0.3)
    (found,) = served(SLOW[0], WIDE[0], prices=prices)
    one, four = (curve.points[0].cost for curve in found.curves)
    assert one == pytest.approx((2.0 + 0.5 * 0.3) / (100 * 3600) * 1e6)
    assert four == pytest.approx((8.0 + 0.5 * 0.3) / (600 * 3600) * 1e6)
    assert found.currency == "EUR"
    other = served(point(0, 1, 100, 0.01, device_name="H100"), prices=prices)[0]
    assert other.curves[0].points[0].cost == pytest.approx((9 + 0.15) / 360_000 * 1e6)


@pytest.mark.parametrize(
    ("hour", "emulated"),
    [({}, False), ({"H100": 1.0}, False), ({"default": 1.0}, True), (1.0, True)],
)
def test_a_card_without_a_price_or_that_is_emulated_costs_nothing_and_no_column_says_so(
    hour: float | dict[str, float], emulated: bool
) -> None:
    rows = [replace(row, emulated=emulated) for row in SLOW]
    (found,) = served(*rows, prices=PricesBlock(card_hour=hour))
    assert found.currency == "" and found.curves[0].points[0].cost is None


def test_a_row_that_its_client_limited_is_flagged_and_never_best() -> None:
    figures = {"client_bound": 1.0, "client_cpu_share": 0.97, "client_lag_s": 0.004}
    bound = point(9, 64, 999, 0.01)
    metrics = {**bound.workload_metrics, **figures}
    bound = point(9, 64, 999, 0.01, workload_metrics=metrics)
    summary = summarize([*SLOW, bound])
    (found,) = summary.served
    assert [p.load for p in found.curves[0].points if p.flagged] == [64]
    chosen = [*found.front, found.curves[0].knee, *(best.point for best in found.best)]
    assert not any(one.flagged for one in chosen if one)
    (flag,) = summary.raised[bound.job_id]
    assert str(flag).startswith("client_bound: its load generator used 97% of a core")
    assert "4.0 ms late" in flag.reason
