"""Workloads by name, and the parameters they take."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from workloads import registry
from workloads.base import BadConfiguration
from workloads.engines import ENGINES

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", registry.WORKLOADS)
def test_every_workload_can_be_loaded(name: str) -> None:
    """The function named in the entry is there and takes a request and a context."""
    assert callable(registry.load(name))


def test_an_unknown_workload_is_refused_with_what_is_close() -> None:
    """The message suggests the name that was probably meant."""
    with pytest.raises(BadConfiguration, match="did you mean 'text-generation'"):
        registry.load("text-generaton")


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_token": 5},
        {"output_tokens": 0},
        {"output_tokens": "64"},
        {"output_tokens": 6.5},
        {"ignore_eos": 1},
        {"attention": "paged"},
        {"keep_texts": -1},
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, object]) -> None:
    """Unknown names, values out of range and values of another type are errors, not guesses."""
    with pytest.raises(ValidationError):
        registry.WORKLOADS["text-generation"].validate(wrong)


def installed(directory: Path, entry: str, *, point: str = "waiting") -> str:
    """Install a package that offers a workload, and say which ones a new process knows."""
    (directory / "waiting-1.dist-info").mkdir()
    (directory / "waiting-1.dist-info" / "METADATA").write_text("Name: waiting\nVersion: 1\n")
    points = f"[nightgrid.workloads]\n{point} = waiting_entry:SPEC\n"
    (directory / "waiting-1.dist-info" / "entry_points.txt").write_text(points)
    (directory / "waiting_entry.py").write_text(entry)
    code = "from workloads.registry import WORKLOADS; print(*WORKLOADS)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{directory}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


ENTRY = """\
from workloads.settings import WorkloadParameters
from workloads.registry import WorkloadSpec
SPEC = WorkloadSpec(
    name="waiting", function="waiting:run", parameters=WorkloadParameters, summary="waits"
)
"""


def test_another_package_offers_a_workload(tmp_path: Path) -> None:
    """It stands beside ours; its function is not imported for that."""
    assert "waiting" in installed(tmp_path, ENTRY).split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "point"),
    [
        ("import nothing_of_that_name", "waiting"),
        ("SPEC = 3", "waiting"),
        (ENTRY, "other-name"),
        (ENTRY.replace('"waiting"', '"finetuning"'), "finetuning"),
    ],
)
def test_a_broken_package_takes_nothing_with_it(tmp_path: Path, entry: str, point: str) -> None:
    """Ours are there and are ours; what is wrong is told."""
    told = installed(tmp_path, entry, point=point)
    assert {"text-generation", "finetuning"} <= set(told.split())
    assert "waiting" not in told.splitlines()[0]
    assert point == "finetuning" or f"workload {point}" in told


ENGINE = """\
from workloads.engines.base import Ability, EngineSpec
from workloads.settings import Settings, setting
class Clashing(Settings):
    rank: int = setting(1, role="choice", description="One more.")
SPEC = EngineSpec(
    name="clashing", summary="clashes", needs="native_eager", install="pip install clashing",
    abilities={"train": Ability(function="nowhere:run", settings=Clashing)},
)
"""


def test_an_engine_whose_setting_is_called_as_a_workloads_costs_only_its_own_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused by name; jobs of other engines have the workload's setting."""
    (tmp_path / "clashing_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.import_module("clashing_engine").SPEC
    monkeypatch.setattr(registry, "ENGINES", {**ENGINES, "clashing": spec})
    finetuning = registry.WORKLOADS["finetuning"]
    with pytest.raises(BadConfiguration, match=r"clashing_engine\.Clashing.*both have 'rank'"):
        finetuning.model("clashing")
    assert finetuning.validate({"rank": 4}, "transformers")["rank"] == 4
