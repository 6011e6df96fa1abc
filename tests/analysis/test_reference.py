"""Data sheets, the roofline, and measured against published."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from grid_cases import grid
from measurement_factory import Night, a_job, precision_grid

from orchestrator.analysis.hardware import (
    Published,
    against_published,
    data_sheets,
    far_below,
    matches,
    published_figures,
    roofline_of,
    share_of,
    sheet_of,
)
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import Job
from orchestrator.core.measurement import Measurement

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "grids" / "gaudi2-vs-a100.yaml"
PUBLISHED = published_figures()
COMPARED = ("pretraining", "summarization-finetuning", "text-to-image")


def chatglm3(**changes: object) -> Measurement:
    """A row that did what optimum-habana's own test of ChatGLM3-6B does."""
    job = a_job(
        workload="text-generation",
        model="/shared/models/chatglm3-6b",
        cards=1,
        precision="bf16",
        batch_size=1,
        parameters=(("ignore_eos", True), ("output_tokens", 100)),
    )
    row = Night(emulated=False).add(job)
    own = {"device_name": "GAUDI2", "parameter_count": 6_243_584_000}
    own["metrics"] = replace(row.metrics, generated_tokens_per_s=60.0)
    return replace(row, **own | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "60.00 tokens/s, published are 150"),
        ({"device_name": "HL-325L"}, "published are 168.9"),
        ({"emulated": True}, ""),
        ({"device_name": "NVIDIA H200"}, ""),
        ({"batch_size": 2}, ""),
        ({"precision": "fp8"}, ""),
        ({"model": "llama-2-7b"}, ""),
        ({"parameters": {"ignore_eos": True, "output_tokens": 128}}, ""),
        ({"parameters": {"ignore_eos": False, "output_tokens": 100}}, ""),
        ({"metrics": replace(chatglm3().metrics, generated_tokens_per_s=74.0)}, "74.00 tokens/s"),
        ({"metrics": replace(chatglm3().metrics, generated_tokens_per_s=80.0)}, ""),
    ],
)
def test_a_row_below_half_of_what_its_card_is_known_to_do_is_named(
    changes: dict[str, object], said: str
) -> None:
    row = chatglm3(**changes)
    (sentence,) = far_below([row], PUBLISHED).values() or [""]
    assert said in sentence if said else not sentence
    banners = summarize([row], published=PUBLISHED).banners
    named = [banner for banner in banners if banner.name == "Far below published figures"]
    assert [banner.count for banner in named] == ([1] if said else [])


def test_the_published_figures_are_there_with_their_speedups() -> None:
    assert len(PUBLISHED) == 18
    comparisons = against_published([], PUBLISHED)
    bert, of_images, t5_lines, *_ = comparisons
    assert t5_lines.lines[0].speedup("A100-80GB") == "2.44× best against best"  # of 1 and of 16
    by_batch = {(line.figure.device, line.figure.batch_size): line for line in bert.lines}
    texts = {key: {d: line.speedup(d) for d in line.speedups} for key, line in by_batch.items()}
    assert texts["Gaudi2", 32] == {"Gaudi1": "3.04×", "A100-80GB": "1.61×"}
    best = {"Gaudi1": "3.53× best against best", "A100-80GB": "1.70×"}
    assert texts["Gaudi2", 64] == best  # over Gaudi1's 32, as in the source
    assert texts["A100-80GB", 32] == {"Gaudi1": "1.89×"}
    assert by_batch["Gaudi2", 64].training == "20,000 in 1 h 33 min"
    assert by_batch["A100-80GB", 64].training == ""
    images = {
        (line.figure.device, line.figure.precision): line.speedups for line in of_images.lines
    }
    assert images["Gaudi2", "bf16"] == {"Gaudi1": pytest.approx(3.25 / 0.925)}
    assert images["Gaudi2", "bf16-mixed"] == {"Gaudi1": pytest.approx(4.34 / 1.19)}
    assert not images["A100-80GB", "fp16"]  # it is doubtful, and nothing is compared with it
    assert any("TITAN RTX" in note and "3.41" in note for note in of_images.notes)


def test_our_row_stands_beside_published_ones_and_emulated_ones_are_counted() -> None:
    row = T5_1()
    row = replace(row, metrics=replace(row.metrics, items_per_s=40.0))
    comparisons = against_published([replace(row, emulated=True)], PUBLISHED)
    assert not any(one.measured for one in comparisons)
    assert [one.emulated for one in comparisons] == [0, 0, 1, 0, 0, 0, 0]
    (one,) = [c for c in against_published([row], PUBLISHED) if c.measured]
    (ours,) = [line for line in one.lines if line.row]
    assert ours.figure.device == "Gaudi2" and ours.figure.value == 40.0
    assert ours.speedups["A100-80GB"] == pytest.approx(40.0 / 8.07)
    assert [line.figure.value for line in one.lines if line.row is None] == [19.7, 8.07]


@cache
def jobs_as_published() -> tuple[Job, ...]:
    """The jobs of the shipped grid once each arrow is followed, as its head says."""
    text = SHIPPED.read_text(encoding="utf-8")
    changed, count = re.subn(r"(?m)^( *\w+: ).*# <- ([^(\n]*).*$", r"\1\2", text)
    assert count > 10
    return tuple(grid(changed).jobs())


def shipped(workload: str, batch_size: int) -> Callable[..., Measurement]:
    def make(**changes: Any) -> Measurement:
        sought = (workload, batch_size)
        job = next(j for j in jobs_as_published() if (j.workload, j.batch_size) == sought)
        return replace(Night(emulated=False).add(job), **changes)

    return make


BERT = shipped("pretraining", 32)
T5_1, T5_16 = (shipped("finetuning", size) for size in (1, 16))


@pytest.mark.parametrize(
    ("make", "changes", "same"),
    [
        (BERT, {}, True),
        (BERT, {"model": "/data/bert-base-uncased/"}, True),
        (BERT, {"model": "/data/bert-large-uncased", "parameter_count": 335_174_458}, False),
        (BERT, {"model": f"Google-BERT/BERT-base-uncased@{'0a' * 20}"}, True),
        (BERT, {"model": "bert-base-uncased", "parameter_count": 1_000_000}, False),
        (BERT, {"model": "/data/bert-base-uncased", "parameter_count": 1_000_000}, False),
        (BERT, {"model": "/data/bert-base-uncased", "parameter_count": None}, False),
        (BERT, {"model": "org/other-encoder"}, False),
        (BERT, {"model": "/data/ours", "details": {"architecture": "BertForMaskedLM"}}, True),
        (BERT, {"model": "ours", "details": {"architecture": "BertForMaskedLM"}}, True),
        (BERT, {"model": "/data/ours", "details": {"architecture": "RobertaForMaskedLM"}}, False),
        (BERT, {"parameters": {"max_length": 128, "autocast": "bf16"}}, False),
        (BERT, {"parameters": {"max_length": 512, "autocast": "none"}}, False),
        (BERT, {"precision": "bf16"}, False),
        (BERT, {"cards": 4}, False),
        (T5_1, {}, True),
        (T5_1, {"workload": "text-generation"}, False),
        (T5_1, {"batch_size": 2}, False),
        (T5_1, {"parameters": {"autocast": "bf16"}}, False),
        (T5_16, {"dataset": "abisee/cnn_dailymail"}, True),
        (T5_16, {"dataset": "/data/cnn_dailymail.jsonl"}, True),
        (T5_16, {"dataset": "data/CNN-DailyMail.parquet"}, True),
        (T5_16, {"dataset": "cnn_dailymail"}, True),
        (T5_16, {"dataset": "/data/cnn_dailymail/train.jsonl"}, False),
        (T5_16, {"dataset": "cnn-dailymail-synthetic"}, False),
        (T5_16, {"dataset": "advertisegen"}, False),
    ],
)
def test_a_row_stands_beside_figures_of_the_same_work(
    make: Callable[..., Measurement], changes: dict[str, Any], same: bool
) -> None:
    row = make(**changes)
    figures = [f for f in PUBLISHED if f.task in COMPARED and matches(row, f)]
    assert bool(figures) is same
    assert any(one.measured for one in against_published([row], PUBLISHED)) is same


@pytest.mark.parametrize(
    "figure",
    [
        one
        for one in PUBLISHED
        if one.task in COMPARED and one.batch_size and "first version" not in one.note
    ],
    ids=lambda figure: f"{figure.model}-{figure.device}-{figure.batch_size}",
)
def test_a_row_of_the_grid_stands_beside_each_published_figure(figure: Published) -> None:
    kind = "GPU" if figure.device.startswith("A100") else "HPU"
    night = Night(emulated=False)
    rows = [
        replace(
            row := night.add(job),
            device_name=figure.device,
            metrics=replace(row.metrics, items_per_s=100.0 * row.cards),
        )
        for job in jobs_as_published()
        if job.accelerator == kind
    ]
    assert len({row.batch_size for row in rows if matches(row, figure)}) == 1
    of_task = [one for one in PUBLISHED if one.task in COMPARED]
    (one,) = [c for c in against_published(rows, of_task) if c.about.model == figure.model]
    mine = next(line for line in one.lines if line.row)
    value = 0.01 if one.about.metric == "latency" else 100.0 * mine.figure.cards
    assert mine.figure.value == value


@pytest.mark.parametrize(
    ("driver", "sheet"),
    [
        ("Gaudi2", "Gaudi2"),
        ("HL-225", "Gaudi2"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM-80GB"),
        ("NVIDIA H800", "H800-SXM"),
        ("NVIDIA L40S", "L40S"),
        ("HL-205", "Gaudi1"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L40", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("AMD EPYC 9B14", None),
        ("", None),
    ],
)
def test_a_data_sheet_is_of_exactly_that_card(driver: str, sheet: str | None) -> None:
    found = sheet_of(chatglm3(device_name=driver))
    assert (found.device if found else None) == sheet


def test_shares_of_bandwidth_and_compute_by_hand() -> None:
    """100 GB of weights in a 50 ms step are 2 TB/s; operations are two a parameter and token."""
    row = Night(emulated=False).add(a_job(batch_size=4))
    metrics = replace(
        row.metrics, tpot_p50_s=0.05, total_tokens_per_s=1000.0, generated_tokens_per_s=800.0
    )
    row = replace(row, metrics=metrics, weight_bytes=100 * 10**9, parameter_count=50 * 10**9)
    sheet = data_sheets()["Gaudi2"]
    share = share_of(row, sheet)
    assert share.bandwidth == pytest.approx(2.0 / 2.46)
    assert share.compute == pytest.approx(2 * 50e9 * 1000 / 432e12)
    assert share.intensity == pytest.approx(4.0)
    reads = replace(row, workload_metrics={"prefill_tokens_per_s": 2000.0})
    assert share_of(reads, sheet).prefill == pytest.approx(2 * 50e9 * 2000 / 432e12)
    training = replace(row, train_flops_per_token=3e11, cards=2, precision="fp32")
    training = replace(training, parameters={"autocast": "bf16"})
    assert share_of(training, sheet).compute == pytest.approx(3e11 * 1000 / 2 / 432e12)
    assert share_of(replace(row, precision="fp32"), sheet).compute is None


def test_emulated_cards_have_no_roofline() -> None:
    night = Night()
    precision_grid(night, sizes=(1, 2), precisions=("bf16",))
    roofline = roofline_of(night.rows)
    assert not roofline.shares and roofline.emulated == 2
    night = Night(emulated=False)
    night.add(a_job(), device_name="NVIDIA H100 PCIe")
    assert roofline_of(night.rows).unknown == ("NVIDIA H100 PCIe",)
