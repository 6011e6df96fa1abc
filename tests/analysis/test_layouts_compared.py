"""Layouts of a gang (copies, split matrices, stages) are ways to do one piece of work."""

from __future__ import annotations

from pathlib import Path

from measurement_factory import Night, with_interval

from orchestrator.analysis.effects import effects_of
from orchestrator.analysis.rankings import Verdict, rankings_of
from orchestrator.analysis.selection import settings_of
from orchestrator.grid.parser import parse_grid

ROOT = Path(__file__).resolve().parents[2]
BESIDE = """\
name: layouts
experiments:
  - name: layouts
    workload: finetuning
    model: tiny-chatglm3
    accelerator: HPU
    precision: fp32
    cards: 4
    batch_size: 8
    method: full
    padding: fixed
    max_length: 48
    gradient_accumulation: 8
    axes: {strategy: [ddp, fsdp2, pipeline]}
"""


def test_all_layouts_of_the_grid_meet_in_one_ranking() -> None:
    path = ROOT / "grids" / "parallelism.yaml"
    night = Night(emulated=False)
    rows = [
        with_interval(night.add(job), 100.0 + number * 10, 1.0)
        for number, job in enumerate(parse_grid(path.read_bytes(), path.name).jobs())
    ]
    (ranking,) = rankings_of(rows, settings_of(rows))
    assert ranking.contenders == len(rows) == 9 and ranking.verdict is Verdict.CLEAR_WINNER
    strategies = {row.parameters["strategy"] for row in ranking.ranked}
    assert strategies == {"ddp", "fsdp2", "zero1", "pipeline"}
    assert ranking.fastest.parameters["strategy"] == "pipeline"


def test_a_pipeline_has_its_ratio_beside_copies() -> None:
    night = Night(emulated=False)
    rates = {"ddp": 100.0, "fsdp2": 80.0, "pipeline": 140.0}
    rows = [
        with_interval(night.add(job), rates[str(dict(job.parameters)["strategy"])], 1.0)
        for job in parse_grid(BESIDE.encode(), "g.yaml").jobs()
    ]
    told = {
        (effect.before, effect.after): effect.ratio
        for effect in effects_of(rows, settings_of(rows))
        if effect.name == "strategy"
    }
    assert {pair: round(ratio.value, 6) for pair, ratio in told.items()} == {
        ("ddp", "fsdp2"): 0.8,
        ("ddp", "pipeline"): 1.4,
    }
    assert all(ratio.decided for ratio in told.values())
