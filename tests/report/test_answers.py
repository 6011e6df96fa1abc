"""The answer first: headline, head to head, tables on the axes that vary, one label everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from driver_cases import STATUS
from measurement_factory import Night, a_job, precision_grid, printed, with_interval

from orchestrator.analysis.rankings import doubt_of
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import Accelerator, State
from orchestrator.core.labels import labels_of
from orchestrator.core.measurement import Measurement
from orchestrator.core.status import Answered
from orchestrator.report.charts import front_figure, heat_map, throughput_curve
from orchestrator.report.export import to_json
from orchestrator.report.html import render
from orchestrator.report.text import to_markdown
from orchestrator.report.wording import answers
from orchestrator.store.schema import OUT_OF_RANGE
from orchestrator.util import format as units
from workloads.base import DIVERGED


def measured(rate: float, half: float | None = 1.0, **changes: object) -> Measurement:
    return with_interval(Night(emulated=False).add(a_job(**changes), items=0), rate, half)


def sides(
    sizes: Sequence[int] = (1, 2, 4, 8), half: float | None = 0.5, **rates: float
) -> list[Measurement]:
    """Rows of several cards by name, with a rate that is proportional to the batch size."""
    return [
        replace(
            measured(rate * n, half and half * n, batch_size=n, accelerator=Accelerator.GPU),
            device_name=name,
            job_id=f"{name}-{n}",
        )
        for name, rate in rates.items()
        for n in sizes
    ]


def trained(rate: float, method: str, **changes: object) -> Measurement:
    row = measured(
        rate, workload="finetuning", parameters=(("method", method), ("samples", 64)), **changes
    )
    return replace(row, metrics=replace(row.metrics, loss_first=2.5, loss_last=1.25))


# ------------------------------------------------------------------ the headline


def test_the_headline_is_the_answer() -> None:
    rows = [
        measured(100.0, precision="fp32", batch_size=16),
        measured(180.0, precision="bf16", batch_size=16),
        measured(179.5, precision="fp16", batch_size=16),
    ]
    summary = summarize(rows)
    unit = summary.rankings[0].unit
    (told,) = answers(summary)
    assert told == (
        f"bf16 or fp16 is the provisional best on Gaudi2, the first at 180.0 {unit}, 1.80× fp32: "
        "its interval overlaps that of fp16; more repeats (max_repeats) or replicates may settle "
        "it."
    )
    page = render(summary, rows)
    assert f"<h1>{told}</h1>" in page
    assert page.index("<h1>") < page.index('id="best"') < page.index('id="run"')
    text = printed(summary, width=300, page="/there/report.html")
    assert text.rstrip().splitlines()[-2:] == [told, "page: /there/report.html"]
    assert f"**{told}**" in to_markdown(summary).replace("\\", "")


def test_what_a_row_leaves_open() -> None:
    calm = doubt_of(measured(100.0, 5.0))
    deviation = calm.deviations["throughput"]
    assert deviation == pytest.approx(0.05 / 1.96, rel=0.01)
    assert not calm.better_by and not calm.flags
    disturbed = {"processor_wait_share": 0.5, "processor_cores": 0.5}
    bound = doubt_of(replace(measured(100.0, 5.0), **disturbed))
    assert bound.better_by["ttft_s"] == bound.better_by["throughput"] > 0.69
    assert not bound.flags and "peak_memory_bytes" not in bound.better_by
    assert doubt_of(replace(measured(100.0), warmup_end="limit")).flags == "not_steady"
    assert doubt_of(measured(100.0, None)).deviations == {}


def test_answers_to_questions_come_first_with_what_they_rest_on() -> None:
    rows = [measured(100.0, precision="fp32"), measured(180.0, precision="bf16")]
    sure = Answered(
        question="best throughput for model <m>",
        figure="throughput",
        job="bf16 b=8",
        job_id=rows[1].job_id,
        value=180.0,
        probability=0.97,
        confidence=0.9,
        reached=True,
        next="fp32 b=8",
        lead=0.8,
        lead_low=0.7,
        lead_high=0.9,
        measured=2,
        predicted=5,
        changes=("int8, predicted at 150 ±20%, is better with probability 0.03",),
        file="answer-1.yaml",
        launch="python -m server --model=m",
    )
    none = Answered(question="best ttft_s", figure="ttft_s", confidence=0.9, unknown=7)
    status = replace(STATUS, total=2, finished=True, answers=(sure, none))
    summary = summarize(rows, status=status)
    sentence = (
        "best throughput for model <m>: bf16 b=8 (throughput 180.0), the best with probability "
        "0.97, 80.0% (70.0% to 90.0%) ahead of fp32 b=8."
    )
    assert answers(summary)[0] == sentence
    page = render(summary, rows)
    assert page.index("<h1>best throughput for model &lt;m&gt;: bf16") < page.index(
        'id="questions"'
    )
    assert page.index('id="questions"') < page.index('id="best"')
    text = printed(summary, width=300)
    for shown in (page, text, to_markdown(summary).replace("\\", "")):
        assert "cells: 2 measured, 5 predicted; confidence 0.90 reached" in shown
        assert "int8, predicted at 150 ±20%, is better with probability 0.03" in shown
        assert "no measured setting has all figures of the question (ttft_s)" in shown
        assert "answer-1.yaml; as a server: python -m server --model=m" in shown
    first, second = json.loads(to_json(summary))["answers"]
    assert first["probability"] == 0.97 and first["file"] == "answer-1.yaml"
    assert (
        second["job"] == "" and second["basis"] == "cells: 7 not known; confidence 0.90 not reached"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param(
            [
                measured(180.0, precision="fp32", batch_size=16),
                measured(179.5, precision="fp16", batch_size=16),
                measured(100.0, precision="fp32", batch_size=8),
            ],
            "1.80× the next that is slower (fp32 b=8): its interval overlaps that of fp16 b=16;",
            id="the next row is the first that is no tie",
        ),
        pytest.param(
            [measured(9.0, None), measured(8.0, None, precision="fp32")],
            "too few repeats",
            id="without intervals",
        ),
        pytest.param([measured(9.0)], "nothing to compare with", id="a single row"),
        pytest.param(
            [measured(100.0, precision="fp32", batch_size=8), measured(180.0, batch_size=16)],
            "1.80× the best fp32 b=8.",
            id="more than the precision differs",
        ),
        pytest.param(
            [measured(100.0, precision="fp32"), measured(180.0)],
            "1.80× fp32.",
            id="the precision alone differs",
        ),
        pytest.param(
            [measured(30.0, 0.5), measured(20.0, 0.5, accelerator=Accelerator.GPU)],
            "Gaudi2 is 1.50× NVIDIA H200",
            id="the first side may be the faster one",
        ),
        pytest.param(
            [measured(20.0, 0.5), measured(20.1, 0.5, accelerator=Accelerator.GPU)],
            "Gaudi2 and NVIDIA H200 are tied at equal settings.",
            id="two sides that are tied",
        ),
        pytest.param(
            [measured(20.0, None), measured(50.0, None, accelerator=Accelerator.GPU)],
            "Gaudi2 and NVIDIA H200 have no order yet at equal settings: too few repeats for an "
            "interval; min_repeats: 2 or more may settle it.",
            id="two sides without intervals",
        ),
        pytest.param(
            [
                *(measured(20.0 * n, 0.1, batch_size=n) for n in (1, 2, 4)),
                *sides(**{"NVIDIA H200": 50.0}, sizes=(1, 2)),
                *sides(**{"NVIDIA H200": 50.0}, sizes=(4,), half=None),
            ],
            "NVIDIA H200 is 2.50× Gaudi2 at equal settings (2.49× to 2.51×, 2 settings).",
            id="a setting of a single repeat does not hide what the others show",
        ),
        pytest.param(
            sides(A=100.0, B=30.0, C=100.1),
            "None of A, B and C is ahead of all others at equal settings.",
            id="two of three sides are tied",
        ),
        pytest.param(
            [*sides(A=100.0, sizes=(1,)), *sides(B=200.0, C=50.0)],
            "B is 2.00× A at equal settings (1.99× to 2.01×, 1 setting).",
            id="the first side has one setting in common with the others",
        ),
    ],
)
def test_a_headline_says_who_won_or_why_nobody_has(rows: list[Measurement], words: str) -> None:
    assert words in answers(summarize(rows))[0]


@pytest.mark.parametrize(
    "reason",
    [
        "no driver",
        "no driver (acquire after 4 attempts; limit is 3 retries: another process holds the card)",
        "no driver (acquire after 1 attempt, the most that a job gets)",
        "acquire after 4 attempts; limit is 1 retry (it is broken): no driver",  # of version 0.1.0
    ],
)
def test_when_nothing_was_measured_failures_come_first(reason: str) -> None:
    night = Night(emulated=False)
    for size in (1, 2):
        night.add(a_job(batch_size=size), State.FAILED, reason=reason)
    summary = summarize(night.rows)
    (told,) = answers(summary)
    assert told == "Nothing was measured. 2 of 2 jobs FAILED: no driver"
    page = render(summary, night.rows)
    assert page.index('id="causes"') < page.index('id="run"') and page.count('id="causes"') == 1
    for name in ("best", "prompts", "head-1", "fronts", "techniques", "training"):
        assert f'id="{name}"' not in page
    assert printed(summary).rstrip().endswith(told)


def test_contended_rows_give_a_provisional_answer_with_what_settles_it() -> None:
    facts = {"processor_wait_share": 0.5, "processor_cores": 0.5}
    rows = [replace(measured(9.0 + size, batch_size=size), **facts) for size in (1, 2)]
    assert answers(summarize(rows)) == (
        "b=2 or b=1 is the provisional best on Gaudi2, the first with at least 11.00 tokens/s: b=1 "
        "shared the processors with other processes and may be faster; to settle it, measure these "
        "2 jobs again: nightgrid run --resume --run smoke --retry-flagged.",
    )
    only_best = answers(summarize([replace(rows[1], **facts), measured(10.5, batch_size=4)]))
    assert "it shared the processors with other processes, and b=4 may be as fast" in only_best[0]


def test_measured_rows_that_all_have_a_flag_are_shown_with_the_reason() -> None:
    rows = [replace(measured(9.0, batch_size=size), timed_compilations=3) for size in (1, 2)]
    failed = Night(emulated=False).add(a_job(batch_size=4), State.FAILED, reason="no driver")
    summary = summarize([*rows, failed])
    (told,) = answers(summary)
    assert told == (
        "Nothing can be ranked: of 2 measured jobs 2 are flagged (2 compiled_in_timed_part), as "
        "in: 3 graphs were compiled while it was timed; a steady row compiles none. "
        "--retry-flagged measures them again."
    )
    for text in (printed(summary), to_markdown(summary)):
        assert text.count("9.000") == 2 and "Flagged rows" in text and "no driver" in text
    page = render(summary, [*rows, failed])
    assert page.index('id="tables"') < page.index('id="flagged"') < page.index('id="causes"')


def test_only_flags_that_another_measurement_may_clear_are_measured_again() -> None:
    diverged = [
        replace(measured(9.0, batch_size=size), details={DIVERGED: "loss 9 became nan"})
        for size in (1, 2)
    ]
    assert answers(summarize(diverged)) == (
        "Nothing can be ranked: of 2 measured jobs 2 are flagged (2 diverged), as in: loss 9 "
        "became nan.",
    )
    unsteady = replace(measured(9.0, batch_size=4), warmup_end="limit")
    (told,) = answers(summarize([*diverged, unsteady]))
    assert told.endswith("became nan. --retry-flagged measures 1 of them again.")


# ------------------------------------------------------------------ head to head


def test_several_accelerators_meet_head_to_head() -> None:
    night = Night(emulated=False)
    for kind in (Accelerator.HPU, Accelerator.GPU):
        precision_grid(night, accelerator=kind, sizes=(1, 8), precisions=("bf16",), dataset="t")
    summary = summarize(night.rows)
    (duel,) = summary.head_to_head
    assert duel.sides == ("Gaudi2", "NVIDIA H200")
    assert [line.label for line in duel.lines] == ["b=8", "b=1"]
    for line in duel.lines:
        old, new = line.rows
        assert old is not None and new is not None and line.ratios[0] is None
        ratio = line.ratios[1]
        assert ratio is not None and ratio.low is not None and ratio.high is not None
        assert old.metrics.throughput and new.metrics.throughput
        assert ratio.value == pytest.approx(new.metrics.throughput / old.metrics.throughput)
        assert ratio.low < ratio.value < ratio.high
    overall = duel.overall[1]
    assert overall is not None and answers(summary)[0].startswith(
        f"NVIDIA H200 is {units.times(overall.value)} Gaudi2 at equal settings ("
    )
    page = render(summary, night.rows)
    assert page.index('id="head-1"') < page.index('id="best"')
    assert "Head to head" in printed(summary) and "Head to head" in to_markdown(summary)


def test_emulated_cards_never_meet_real_ones_and_unequal_settings_never_meet() -> None:
    real = measured(30.0, accelerator=Accelerator.GPU)
    assert not summarize([real, replace(measured(20.0), emulated=True)]).head_to_head
    other = measured(20.0, parameters=(("output_tokens", 16),))
    assert not summarize([real, other]).head_to_head


# ------------------------------------------------------------------ axes that vary


def test_methods_are_the_lines_of_one_table() -> None:
    rows = [
        trained(rate * size, method, batch_size=size)
        for method, rate in (("full", 10.0), ("lora", 30.0), ("qlora", 20.0))
        for size in (1, 4)
    ]
    (table,) = summarize(rows).tables
    assert table.lines == ("method lora", "method qlora", "method full")  # the fastest first
    assert table.columns == ("1", "4") and len(table.cells) == 6 and len(table.best) == 3
    summary = summarize(rows)  # a span of the timeline never loses its method
    assert all(row.parameters["method"] in name for row in rows for name in summary.names(row))


def test_two_settings_that_vary_alone_are_both_axes() -> None:
    kinds = ("sdpa", "eager")
    rows = [
        measured(9.0, parameters=(("attention", a), ("output_tokens", n)))
        for n in (8, 16, 32)
        for a in kinds
    ]
    (table,) = summarize(rows).tables
    assert (table.line_name, table.column_name) == ("output tokens", "attention")
    assert table.lines == ("8", "16", "32") and set(table.columns) == set(kinds)


def test_one_value_does_not_bleach_the_rest() -> None:
    rows = [measured(rate, batch_size=n) for n, rate in enumerate((1.0, 2.0, 4.0, 500.0), 1)]
    (table,) = summarize(rows).tables
    heats = [table.heat(row) for row in rows]
    assert table.log and heats == sorted(heats) and heats[1] - heats[0] > 0.08
    assert "logarithmic" in heat_map(table, "t")
    (even,) = summarize(rows[:3]).tables
    assert not even.log and [even.heat(row) for row in rows[:3]] == [0.25, 0.5, 1.0]
    flagged = replace(rows[3], details={OUT_OF_RANGE: "x"})
    (odd,) = summarize([*rows[:3], flagged]).tables
    assert not odd.log and "logarithmic" in throughput_curve(odd, "t"), "its point is drawn"
    (alone,) = summarize([flagged]).tables
    assert alone.unit == flagged.metrics.throughput_unit != ""


# ------------------------------------------------------------------ training, shared facts


def test_training_shows_the_first_and_the_last_loss() -> None:
    rows = [trained(10.0, "lora", batch_size=1), trained(30.0, "lora", batch_size=4)]
    summary = summarize(rows)
    for text in (render(summary, rows), printed(summary), to_markdown(summary)):
        assert "Training" in text and "loss first" in text and "loss last" in text
        assert re.search(r"b=4.*2\.500.*1\.250", text, re.DOTALL)
    assert "loss 2.500 → 1.250" in render(summary, rows)


def test_what_is_the_same_is_said_per_workload() -> None:
    summary = summarize([measured(9.0), measured(8.0, batch_size=2), trained(5.0, "lora")])
    assert summary.shared["text-generation"]["output tokens"] == "128"
    assert "attention" not in summary.shared["text-generation"], "nobody set it"
    assert summary.shared["finetuning"]["method"] == "lora"
    assert "Same in every row of finetuning" in render(summary, list(summary.rows))


# ------------------------------------------------------------------ one label


def test_a_job_and_its_row_have_one_label() -> None:
    jobs = [
        a_job(model=model, precision=precision, parameters=(("output_tokens", tokens),))
        for model in ("chatglm3-6b", "tiny-chatglm3")
        for precision in ("fp32", "bf16")
        for tokens in (8, 16)
    ]
    night = Night()
    for job in jobs:
        night.add(job, items=0)
    of_jobs, summary = labels_of(jobs), summarize(night.rows)
    assert {job_id: str(one) for job_id, one in of_jobs.items()} == {
        row.job_id: summary.label(row) for row in summary.rows
    }
    assert str(of_jobs[jobs[0].job_id]) == "chatglm3-6b output tokens 8 fp32"
    assert len({str(one) for one in of_jobs.values()}) == len(jobs)
    for row in summary.rows:
        assert summary.label(row).endswith(summary.chosen(row))


def test_a_label_holds_nothing_empty_and_nothing_that_its_place_tells() -> None:
    columns = {"advertisegen-synthetic": "", "alpaca": "prompt=question, answer=text"}
    jobs = [
        a_job(dataset=data, parameters=(("columns", text), ("output_tokens", tokens)))
        for data, text in columns.items()
        for tokens in (8, 16)
    ]
    labels = {str(label) for label in labels_of(jobs).values()}
    assert labels == {f"{data} output tokens {n}" for data in columns for n in (8, 16)}
    one_place = [a_job(parameters=(("columns", text),)) for text in columns.values()]
    assert len(set(map(str, labels_of(one_place).values()))) == 2


def test_a_label_names_method_and_rank_whatever_else_varies() -> None:
    jobs = [
        a_job(
            workload="finetuning",
            parameters=(
                *(("method", "lora"), ("rank", rank), ("samples", samples)),
                *(("max_length", length), ("steps", steps)),
            ),
        )
        for rank in (4, 8)
        for samples, length, steps in ((64, 128, 4), (64, 128, 8), (32, 128, 4), (64, 256, 4))
    ]
    words = [str(label) for label in labels_of(jobs).values()]
    assert len(set(words)) == len(jobs) and all("rank" in one for one in words)


def test_a_wide_table_becomes_records_in_a_narrow_terminal() -> None:
    rows = [replace(trained(30.0, "lora"), details={"loss_flag": "the loss did not fall"})]
    rows.append(trained(10.0, "qlora"))
    summary = summarize(rows)
    narrow, wide = printed(summary, width=60), printed(summary, width=200)
    assert max(map(len, narrow.splitlines())) <= 60
    flat = " ".join(narrow.split())
    assert "30.00 ±3.3% · loss first 2.500 · loss last 1.250" in flat
    assert "what is wrong the loss did not fall" in flat and "what is wrong" in wide
    assert re.search(r"job .*loss first +loss last", wide)


def test_a_stopped_run_says_measured_of_planned_and_when_asked_with_which_versions() -> None:
    rows = [measured(100.0), measured(50.0, precision="fp32")]
    ended = {"counts": {"SUCCEEDED": 2, "NOT_STARTED": 4}, "stopping": "SIGINT received"}
    status = replace(STATUS, total=6, finished=True, **ended)
    summary = summarize(rows, status=status)
    assert summary.verdict == "STOPPED (SIGINT received): 2 of 6 jobs measured."
    for verbose in (False, True):
        text = printed(summary, verbose=verbose)
        assert summary.verdict in text and summary.verdict in to_markdown(summary)
        assert ("Made with" in text) is ("time assigned" in text) is verbose


def test_a_flagged_row_that_was_measured_again_is_no_retry() -> None:
    night = Night()
    night.add(a_job(), final=False)
    night.add(a_job(), attempt=2)
    night.add(a_job(batch_size=2), State.FAILED, final=False)
    night.add(a_job(batch_size=2), attempt=2)
    (attempts,) = summarize(night.rows).retried
    assert [row.state for row in attempts] == [State.FAILED, State.SUCCEEDED]


def test_the_growth_of_a_warm_process_is_no_smallest_memory() -> None:
    grown = {"peak_host_memory_bytes": 3 << 30, "baseline_host_memory_bytes": 1 << 30}
    fresh = replace(measured(10.0), **grown, jobs_before=0, peak_device_memory_bytes=None)
    warm = replace(
        measured(20.0, precision="fp32"),
        **(grown | {"baseline_host_memory_bytes": 2 << 30}),
        jobs_before=3,
        peak_device_memory_bytes=None,
    )
    assert summarize([fresh]).rankings[0].smallest_memory == fresh
    (ranking,) = summarize([fresh, warm]).rankings
    assert ranking.smallest_memory is None
    assert "growth of a warm process" in render(summarize([fresh, warm]), [fresh, warm])


def test_names_on_a_front_lie_on_no_mark() -> None:
    """Names and marks are told from the drawing: text at x, y in a box of its letters."""
    rates = ((1, 10.0), (2, 11.0), (4, 12.0), (8, 30.0), (16, 31.0), (32, 33.0))
    rows = []
    for precision in ("fp32", "bf16"):
        for size, rate in rates:
            row = measured(rate * (1 if precision == "fp32" else 1.05), batch_size=size)
            metrics = replace(row.metrics, latency_p50_s=size / rate)
            job_id = f"{precision}{size:02}".ljust(16, "0")
            rows.append(replace(row, job_id=job_id, precision=precision, metrics=metrics))
    (front,) = summarize(rows).fronts
    drawing = front_figure(front, "t", summarize(rows).chosen)
    marks = re.findall(r'class="mark[^"]*" d="M([\d.]+) ([\d.]+)', drawing)
    names = re.findall(r'<text class="name[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)<', drawing)
    assert len(marks) == len(rows) and len(names) >= 2
    for x, y, name in names:
        left, line, right = float(x), float(y), float(x) + 6.8 * len(name)
        for at, height in marks:
            beside = not left - 5 < float(at) < right + 5
            assert beside or not line - 14 < float(height) < line + 6, (name, at, height)


def test_a_card_whose_jobs_worked_elsewhere_is_named() -> None:
    night = Night(emulated=False)
    job, other, broken = a_job(), a_job(batch_size=2), a_job(batch_size=4)
    for one in (job, other):
        night.add(one, State.FAILED, final=False, reason="error; retry 1 of 1", card_indices=(3,))
        night.add(one, attempt=2, card_indices=(4,))
    night.add(broken, State.FAILED, card_indices=(4,))  # nowhere else either
    night.rows = [replace(row, nodes=("hpu-1",)) for row in night.rows]
    [(lane, failed)] = summarize(night.rows).timeline.blamed()
    assert lane.name == "hpu-1/HPU3" and len(failed) == 2
    assert "Cards on which jobs failed that worked elsewhere" in to_markdown(summarize(night.rows))
