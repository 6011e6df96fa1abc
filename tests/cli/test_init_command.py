"""``nightgrid init``: the file it writes is a sound grid, and nothing is written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from orchestrator.grid.parser import load_grid
from orchestrator.grid.schema import name_of
from workloads.registry import WORKLOADS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of somebody who has a model's name and some data, and no checkout."""
    monkeypatch.chdir(tmp_path)
    pair = {"instruction": "add", "input": "1 2", "output": "3"}
    (tmp_path / "mine.jsonl").write_text(f"{json.dumps(pair)}\n" * 3)
    return tmp_path


def test_the_file_plans_jobs_of_ones_own_data(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--model", "tiny-chatglm3", "--dataset", "mine.jsonl", "--workload", "finetuning"]
    assert main(["init", "mine.yaml", *named, "--accelerator", "gaudi2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accelerator"] == "HPU" and "int8" not in told["precisions"]
    jobs = load_grid(here / "mine.yaml").jobs()
    assert {(job.workload, job.dataset) for job in jobs} == {("finetuning", "mine.jsonl")}
    assert main(["plan", "mine.yaml", "--emulate", "1x2", "--json"]) == 0
    actions = [job["action"] for job in json.loads(capsys.readouterr().out)["jobs"]]
    assert actions == ["run"] * 5 * len(told["precisions"]) and "bf16" in told["precisions"]


@pytest.mark.slow
@pytest.mark.parametrize("workload", [w.name for w in WORKLOADS.values() if "causal-lm" in w.tasks])
def test_every_setting_that_it_shows_may_be_written(workload: str, here: Path) -> None:
    if WORKLOADS[workload].implied:
        pytest.skip("plans add it themselves")
    assert main(["init", "--model", "tiny-chatglm3", "--workload", workload]) == 0
    text = (here / "grid.yaml").read_text()
    shown = [line[4:] for line in text.splitlines() if line.startswith("#   ") and line[4] != " "]
    lines = [line for line in shown if not line.startswith("nightgrid ") and ": " in line]
    assert lines
    (here / "all.yaml").write_text(
        text.replace("defaults:\n", "defaults:\n" + "".join(f"  {line}\n" for line in lines))
    )
    load_grid(here / "all.yaml")


def test_nothing_is_written_over(here: Path) -> None:
    (here / "grid.yaml").write_text("mine")
    assert main(["init", "--model", "tiny-chatglm3"]) == 4
    assert (here / "grid.yaml").read_text() == "mine"
    assert main(["init", "--model", "tiny-chatglm3", "--force"]) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["--model", "tiny-chatglm"],
        ["--model", "tiny-chatglm3", "--dataset", "nowhere.jsonl"],
        ["--model", "tiny-chatglm3", "--accelerator", "abacus"],
        ["--model", "tiny-chatglm3", "--workload", "cooking"],
    ],
)
def test_what_is_not_there_is_refused_and_nothing_written(wrong: list[str], here: Path) -> None:
    assert main(["init", *wrong]) != 0
    assert not (here / "grid.yaml").exists()


@pytest.mark.parametrize(
    ("model", "name"),
    [("./models/chatglm3-6b/", "chatglm3-6b"), ("org/My Model", "My-Model"), ("...", "first")],
)
def test_a_grid_is_named_after_its_model(model: str, name: str) -> None:
    assert name_of(model) == name
    assert name_of(model, "grids/tune.yaml") == "tune"
