"""Forms of one model: how each was made, its size, quality and speed, in one table."""

from __future__ import annotations

from dataclasses import replace

from measurement_factory import Night, a_job

from orchestrator.analysis.summary import Summary, summarize
from orchestrator.core.measurement import Measurement
from orchestrator.report.blocks import Section
from orchestrator.report.html import render
from orchestrator.report.sections import sections
from orchestrator.report.text import to_markdown


def rows() -> list[Measurement]:
    night = Night(emulated=False)
    step = night.add(a_job(workload="quantization", model="trained"))
    made = {"save_model": "small", "method": "static", "numbers": "int8", "sparsity": "none"}
    night.rows[-1] = replace(step, parameters={**step.parameters, **made})
    for model, precision, given in (
        ("trained", "fp32", {"quality_of": "trained"}),
        ("small", "int8", {"quality_of": "trained", "calibration": "ranges"}),
        ("another", "fp32", {}),
    ):
        row = night.add(a_job(model=model, precision=precision))
        night.rows[-1] = replace(
            row,
            parameters={**row.parameters, **given},
            weight_bytes=4_000_000 if precision == "fp32" else 1_000_000,
            workload_metrics={"quality_top1_agreement": 0.97, "quality_kl": 0.001},
        )
    return night.rows


def forms(summary: Summary) -> Section | None:
    return next((one for one in sections(summary) if one.id == "forms"), None)


def test_each_form_says_how_it_was_made_and_what_it_is_worth() -> None:
    section = forms(summarize(rows()))
    assert section is not None
    found = section.table
    assert [(row[0], row[1]) for row in found.rows] == [
        ("trained", ""),
        ("small", "quantization of trained: method static, numbers int8"),
    ]
    small = found.rows[1]
    assert small[2].startswith("int8 ") and small[2].endswith("calibration ranges")
    assert small[3:6] == ("977 KiB", "0.9700", "0.001000")
    assert "±" in small[7] and "trained in fp32" in section.note


def test_the_table_is_on_the_page_and_in_markdown_and_nowhere_without_forms() -> None:
    summary = summarize(rows())
    assert 'id="forms"' in render(summary, summary.rows) and "Forms of one model" in to_markdown(
        summary
    )
    plain = summarize(rows()[-1:])
    assert forms(plain) is None and 'id="forms"' not in render(plain, plain.rows)
