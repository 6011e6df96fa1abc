"""``nightgrid init``: the file it writes is a sound grid, and nothing is written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Nightgrid

from orchestrator.grid.parser import load_grid
from orchestrator.grid.schema import name_of
from workloads.registry import WORKLOADS


@pytest.fixture(autouse=True)
def here(workplace: Path) -> Path:
    """A directory of somebody who has a model's name and some data, and no checkout."""
    pair = {"instruction": "add", "input": "1 2", "output": "3"}
    (workplace / "mine.jsonl").write_text(f"{json.dumps(pair)}\n" * 3)
    return workplace


def test_the_file_plans_jobs_of_ones_own_data(nightgrid: Nightgrid) -> None:
    named = ("--model", "tiny-chatglm3", "--dataset", "mine.jsonl", "--workload", "finetuning")
    written = nightgrid("init", "mine.yaml", *named, "--accelerator", "gaudi2", "--json").json
    assert written["accelerator"] == "HPU" and "int8" not in written["precisions"]
    jobs = load_grid(Path("mine.yaml")).jobs()
    assert {(job.workload, job.dataset) for job in jobs} == {("finetuning", "mine.jsonl")}
    plan = nightgrid("plan", "mine.yaml", "--emulate", "1x2", "--json").json
    actions = [job["action"] for job in plan["jobs"]]
    assert actions == ["run"] * 5 * len(written["precisions"]) and "bf16" in written["precisions"]


def test_columns_and_others_names_of_workloads_are_taken(nightgrid: Nightgrid) -> None:
    Path("asked.jsonl").write_text(f"{json.dumps({'question': 'a', 'reply': 'b'})}\n" * 3)
    named = ("--model", "tiny-chatglm3", "--dataset", "asked.jsonl", "--workload", "inference")
    nightgrid("init", *named, "--columns", "prompt=question, completion=reply")
    jobs = load_grid(Path("grid.yaml")).jobs()
    assert {job.workload for job in jobs} == {"text-generation"}
    assert {dict(job.parameters)["columns"] for job in jobs} == {
        "prompt=question, completion=reply"
    }
    _, _, schema = Path("grid.yaml").read_text().splitlines()[0].partition("$schema=")
    assert json.loads(Path(schema).read_text())["$schema"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", [w.name for w in WORKLOADS.values() if "causal-lm" in w.tasks and not w.implied]
)
def test_every_setting_that_it_shows_may_be_written(workload: str, nightgrid: Nightgrid) -> None:
    nightgrid("init", "--model", "tiny-chatglm3", "--workload", workload)
    text = Path("grid.yaml").read_text()
    shown = [line[4:] for line in text.splitlines() if line.startswith("#   ") and line[4] != " "]
    lines = [line for line in shown if not line.startswith("nightgrid ") and ": " in line]
    assert lines
    settings = "".join(f"  {line}\n" for line in lines)
    Path("all.yaml").write_text(text.replace("defaults:\n", f"defaults:\n{settings}"))
    load_grid(Path("all.yaml"))


def test_nothing_is_written_over_unless_asked(nightgrid: Nightgrid) -> None:
    Path("grid.yaml").write_text("mine")
    nightgrid("init", "--model", "tiny-chatglm3", code=4)
    assert Path("grid.yaml").read_text() == "mine"
    nightgrid("init", "--model", "tiny-chatglm3", "--force")


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (["--model", "tiny-chatglm"], 1),
        (["--model", "tiny-chatglm3", "--dataset", "nowhere.jsonl"], 2),
        (["--model", "tiny-chatglm3", "--accelerator", "abacus"], 1),
        (["--model", "tiny-chatglm3", "--workload", "cooking"], 1),
    ],
)
def test_what_is_not_there_is_refused_and_nothing_written(
    wrong: list[str], code: int, nightgrid: Nightgrid
) -> None:
    nightgrid("init", *wrong, code=code)
    assert not Path("grid.yaml").exists()


@pytest.mark.parametrize(
    ("model", "name"),
    [("./models/chatglm3-6b/", "chatglm3-6b"), ("org/My Model", "My-Model"), ("...", "first")],
)
def test_a_grid_is_named_after_its_model_or_its_file(model: str, name: str) -> None:
    assert name_of(model) == name
    assert name_of(model, "grids/tune.yaml") == "tune"
