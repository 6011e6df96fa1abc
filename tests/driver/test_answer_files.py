"""The ready file of an answer: the grid of its one job, and the command that serves it."""

from __future__ import annotations

import pytest

from orchestrator.driver.answers import serving_command
from orchestrator.grid.parser import parse_grid
from orchestrator.grid.schema import one_job_grid

GRIDS = {
    "generation": """
defaults: {workload: text-generation, model: tiny-chatglm3, accelerator: CPU, engine: graph}
measure: {max_repeats: 7, time_limit_s: 3.5}
experiments:
  - {name: "on: 1 #2", output_tokens: 16, axes: {precision: [fp32, bf16], batch_size: [1, max]}}
""",
    "training": """
defaults: {workload: finetuning, model: tiny-chatglm3, accelerator: CPU}
experiments:
  - {name: a, method: lora, steps: 3, axes: {cards: [1, 2], rank: [4, 8]}}
""",
    "serving": """
defaults: {workload: serving, model: tiny-chatglm3, accelerator: CPU, engine: graph}
experiments:
  - {name: a, slo: "ttft_s=0.5", axes: {concurrency: [1, 2]}}
""",
}


@pytest.mark.parametrize("name", GRIDS)
def test_the_grid_of_one_job_is_that_job(name: str) -> None:
    for job in parse_grid(f"name: g{GRIDS[name]}".encode(), "g.yaml").jobs():
        text = one_job_grid(job, "answer", ["best of all:", "0.93: # probability"])
        (again,) = parse_grid(text.encode(), "answer.yaml").jobs()
        assert again == job and again.job_id == job.job_id


def test_a_served_setting_has_its_command() -> None:
    job, *_ = parse_grid(f"name: g{GRIDS['serving']}".encode(), "g.yaml").jobs()
    command = serving_command(job)
    assert command.startswith("python") and "workloads.engines.graph.server" in command
    assert "--model=tiny-chatglm3" in command and "--port=8000" in command
    job, *_ = parse_grid(f"name: g{GRIDS['training']}".encode(), "g.yaml").jobs()
    assert serving_command(job) == ""
