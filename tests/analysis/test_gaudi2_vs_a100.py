"""grids/gaudi2-vs-a100.yaml: it plans, and with the real models its rows are those published."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from grid_cases import grid
from measurement_factory import Night

from orchestrator.analysis.hardware import Published, against_published, matches, reference
from orchestrator.core.job import Job
from orchestrator.core.plan import Action
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.parser import load_grid
from orchestrator.planning.planner import make_plan

SHIPPED = Path(__file__).resolve().parents[2] / "grids" / "gaudi2-vs-a100.yaml"
COMPARED = ("pretraining", "summarization-finetuning", "text-to-image")
PUBLISHED = [figure for figure in reference().published if figure.task in COMPARED]


def as_published() -> tuple[Job, ...]:
    """The jobs of the grid once each arrow is followed, as its head says."""
    text = SHIPPED.read_text(encoding="utf-8")
    changed, count = re.subn(r"(?m)^( *\w+: ).*# <- ([^(\n]*).*$", r"\1\2", text)
    assert count > 10
    return tuple(grid(changed).jobs())


@pytest.mark.parametrize("cluster", ["2x8:HPU,2x8:GPU", "1x8:HPU,1x8:GPU"])
def test_the_shipped_grid_runs_on_emulated_cards(cluster: str) -> None:
    shipped = load_grid(SHIPPED)
    plan = make_plan(shipped, parse_emulation(cluster, shipped.accelerators()), [])
    assert {item.action for item in plan.jobs} == {Action.RUN}
    assert {job.experiment for job in shipped.jobs()} == {
        "bert-pretraining",
        "t5-summarization",
        "t5-deepspeed",
        "stable-diffusion",
    }


@pytest.mark.parametrize(
    "figure",
    [each for each in PUBLISHED if each.batch_size and "first version" not in each.note],
    ids=lambda figure: f"{figure.model}-{figure.device}-{figure.batch_size}",
)
def test_a_row_of_the_grid_stands_beside_each_published_figure(figure: Published) -> None:
    kind = "GPU" if figure.device.startswith("A100") else "HPU"
    night = Night(emulated=False)
    rows = [
        replace(night.add(job), device_name=figure.device)
        for job in as_published()
        if job.accelerator == kind
    ]
    rows = [
        replace(row, metrics=replace(row.metrics, items_per_s=100.0 * row.cards)) for row in rows
    ]
    found = [row for row in rows if matches(row, figure)]
    assert found and len({row.batch_size for row in found}) == 1
    (one,) = [
        each for each in against_published(rows, PUBLISHED) if each.about.model == figure.model
    ]
    assert one.measured
    mine = next(line for line in one.lines if line.ours)
    assert mine.figure.value == (
        0.01 if one.about.metric == "latency" else 100.0 * mine.figure.cards
    )


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"model": "/data/bert-base-uncased/"}, True),
        ({"model": "/data/bert-large-uncased"}, False),
        ({"parameters": {"max_length": 128, "autocast": "bf16"}}, False),
        ({"parameters": {"max_length": 512, "autocast": "none"}}, False),
        ({"precision": "bf16"}, False),
        ({"cards": 4}, False),
    ],
)
def test_a_chunk_of_another_length_is_another_work(changes: dict[str, object], same: bool) -> None:
    job = next(j for j in as_published() if j.workload == "pretraining" and j.batch_size == 32)
    row = replace(Night(emulated=False).add(job), **changes)  # type: ignore[arg-type]
    figures = [f for f in PUBLISHED if f.device == "Gaudi2" and f.batch_size == 32]
    assert [matches(row, figure) for figure in figures] == [same]


@pytest.mark.parametrize(
    ("dataset", "same"),
    [
        ("abisee/cnn_dailymail", True),
        ("/data/cnn_dailymail.jsonl", True),
        ("data/CNN-DailyMail.parquet", True),
        ("cnn_dailymail", True),
        ("/data/cnn_dailymail/train.jsonl", False),
        ("cnn-dailymail-synthetic", False),
    ],
)
def test_a_dataset_is_told_by_the_last_part_of_its_path(dataset: str, same: bool) -> None:
    job = next(j for j in as_published() if j.workload == "finetuning" and j.batch_size == 16)
    row = replace(Night(emulated=False).add(job), dataset=dataset)
    (figure,) = [f for f in PUBLISHED if f.dataset and f.batch_size == 16]
    assert matches(row, figure) is same
