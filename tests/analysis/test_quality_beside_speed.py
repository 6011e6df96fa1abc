"""Quality stands beside speed in every cell, and fronts can be drawn at equal quality."""

from __future__ import annotations

from pathlib import Path

import pytest
from measurement_factory import Night, a_job

from orchestrator.analysis.metrics import equal, quality_note
from orchestrator.analysis.summary import at_equal_quality, summarize
from orchestrator.cli.main import main
from orchestrator.core.measurement import Measurement
from orchestrator.report.wording import cell
from orchestrator.store.store import Store

AGREEMENT = {"fp32": 1.0, "bf16": 0.97, "int4": 0.6}


def rows() -> list[Measurement]:
    night = Night(emulated=False)
    for precision, agreement in AGREEMENT.items():
        for size in (8, 16):
            job = a_job(precision=precision, batch_size=size)
            compared = precision != "bf16" or size == 8
            figures = {"quality_top1_agreement": agreement} if compared else {}
            night.add(job, workload_metrics=figures)
    return night.rows


def test_a_cell_has_its_quality_beside_its_speed() -> None:
    summary = summarize(rows())
    (table,) = summary.tables
    notes = {size: cell(table, "bf16", size).notes[0] for size in ("8", "16")}
    assert notes["8"].endswith("0.9700 same tokens") and "same" not in notes["16"]
    assert [quality_note(row) for row in rows()][4] == "0.6000 same tokens"


def test_fine_tuning_names_the_loss_on_held_out_examples() -> None:
    night = Night(emulated=False)
    told = {"held_out_loss": 2.25, "first_batch_loss_after": 1.0}
    row = night.add(a_job(workload="finetuning"), workload_metrics=told)
    assert quality_note(row) == "2.250 held-out loss"
    assert not equal(row) and not equal(row, 5.0)


def test_speed_is_what_is_judged_unless_asked() -> None:
    summary = summarize(rows())
    (front,) = summary.fronts
    assert {row.precision for row in (*front.best, *front.beaten)} == set(AGREEMENT)
    (front,) = at_equal_quality(summary).fronts
    there = {(row.precision, row.batch_size) for row in (*front.best, *front.beaten)}
    assert there == {("fp32", 8), ("fp32", 16), ("bf16", 8)}
    (front,) = at_equal_quality(summary, 0.99).fronts
    assert {row.precision for row in (*front.best, *front.beaten)} == {"fp32"}
    assert [equal(row) for row in rows()] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("option", "left"),
    [([], {"int4"}), (["--equal-quality"], {"fp32", "bf16"})],
)
def test_the_command_draws_fronts_at_equal_quality(
    tmp_path: Path, option: list[str], left: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(tmp_path, "compared") as store:
        store.append(*rows())
    line = ["report", "compared", "--results", str(tmp_path), "--format", "html", "--output", "-"]
    assert main([*line, *option]) == 0
    page = capsys.readouterr().out
    fronts = page[page.index('<section id="fronts">') :].partition("</section>")[0]
    assert {precision for precision in AGREEMENT if precision in fronts} == left
    assert "0.6000 same tokens" in page
