"""Served models on the page and in the terminal, and the prices of a run's grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import measurements
import pytest

from orchestrator.analysis.hardware import Reference, parse_published
from orchestrator.analysis.serving import NO_PRICES, Prices
from orchestrator.analysis.summary import Summary, summarize
from orchestrator.report import exchange
from orchestrator.report.figure_data import figure_csv
from orchestrator.report.html import render
from orchestrator.report.run_report import read_prices
from orchestrator.report.text import to_markdown


@pytest.fixture(scope="module")
def summary() -> Summary:
    """Two engines under four loads each."""
    rows = [
        measurements.row(
            10 * place + n,
            workload="serving",
            engine=engine,
            parameters={"concurrency": 2**n, "slo": "latency_s=1.5"},
            workload_metrics={
                "output_tokens_per_s": rate,
                "tokens_per_s_per_user": 100 / 2**n,
                "latency_p50_s": 0.5 + n,
            },
            device_name="Gaudi2",
            emulated=False,
        )
        for place, engine in enumerate(("vllm", "sglang"))
        for n, rate in enumerate((100 + place, 180, 300, 350 - place))
    ]
    return summarize(rows, prices=Prices(card_hour={"default": 3.6}))


def test_the_page_draws_fronts_and_knees_and_names_the_best_setting(summary: Summary) -> None:
    page = render(summary, summary.rows, lambda rows: rows)
    section = page.partition('id="served-1"')[2].partition("</section>")[0]
    section = section.replace("\N{NO-BREAK SPACE}", " ")
    assert section.count("<svg") == 2 and 'class="front"' in section and 'class="knee"' in section
    for text in ("latency ≤ 1.5 s", "no limit", "cost of 1M tokens, EUR", "vllm", "sglang"):
        assert text in section, text


def test_the_terminal_has_the_best_settings(summary: Summary) -> None:
    lines = to_markdown(summary).splitlines()
    (best,) = (line for line in lines if line.startswith("| no limit"))
    assert best.split(" | ")[1:4] == ["vllm", "8", "350.0"]
    assert "2.857" in best  # 3.6 an hour over 350 tokens/s


def test_figures_and_other_formats_have_every_point(summary: Summary) -> None:
    table = figure_csv(summary)["served.csv"].splitlines()
    assert len(table) == 9 and "per_user" in table[0]
    assert len(list(exchange.lines(summary.rows, "vllm-bench"))) == 8


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
    figures = Reference(published=parse_published(TABLE, "dump.csv"))
    summary = summarize([row], reference=figures)
    titles = [(one.title, one.about.unit) for one in summary.published]
    load = "serving: Llama-3.1-70B, input tokens 1024, output tokens 1024, concurrency 4"
    assert titles == [(load, "tokens/s per user"), (load, "tokens/s per card")]
    page = render(summary, summary.rows, lambda rows: rows)
    section = page.partition('id="published"')[2].partition("</section>")[0]
    for text in ("0.75× h200_sxm", "0.50× h200_sxm", "100.0 tokens/s per card", "dump.csv"):
        assert text in section, text
    assert summarize([replace(row, emulated=True)], reference=figures).published == ()


@pytest.mark.parametrize(
    ("damage", "words"),
    [(("cards", "boxes"), "no column 'cards'"), (("4,40", "4,x"), "line 2: ")],
)
def test_a_table_that_cannot_be_read_names_the_line(damage: tuple[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_published(TABLE.replace(*damage), "dump.csv")


def test_prices_are_read_from_the_runs_grid(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    assert read_prices(tmp_path) == NO_PRICES
    grid.write_text("name: g\nprices: {card_hour: 2, kwh: 0.3, currency: USD}\n")
    expected = Prices(card_hour={"default": 2}, kwh=0.3, currency="USD")
    assert read_prices(tmp_path) == expected
    for text in ("name: g\n", "prices: {card_hour: dear}\n", "[", "- 1\n"):
        grid.write_text(text)
        assert read_prices(tmp_path) == NO_PRICES
