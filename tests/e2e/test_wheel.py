"""The wheel, unpacked in a directory of its own: a first grid is written, planned and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from patience import patience

pytestmark = pytest.mark.slow  # a wheel is built and installed

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("nightgrid", "orchestrator", "workloads", "grids", "pyproject.toml", "README.md")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the wheel's files were unpacked to, as `pip install --target` does."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--quiet", "--wheel-dir", place, source], check=True, timeout=patience(120)
    )
    [wheel] = place.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(place / "installed")
    return place / "installed"


def nightgrid(installed: Path, here: Path, *words: str) -> str:
    """The command's output, run as the wheel's entry point in another directory."""
    [about] = installed.glob("*.dist-info/entry_points.txt")
    points = ConfigParser()
    points.read(about)
    module, _, function = points["console_scripts"]["nightgrid"].partition(":")
    code = (
        f"import sys, orchestrator, {module} as cli\n"
        f"assert orchestrator.__file__.startswith({str(installed)!r}), orchestrator.__file__\n"
        f"sys.exit(cli.{function}(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_first_grid_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    nightgrid(installed, tmp_path, "init", "--model", "tiny-chatglm3", "--accelerator", "CPU")
    few = ["--set", "axes.batch_size=2", "--set", "axes.precision=fp32", "--set", "prompts=2"]
    few += ["--set", "output_tokens=2", "--set", "measure.max_repeats=3"]
    printed = nightgrid(installed, tmp_path, "run", "grid.yaml", *few, "--in-process", "--json")
    assert [row["state"] for row in json.loads(printed)["rows"]] == ["SUCCEEDED"]
    assert (tmp_path / "results" / "tiny-chatglm3" / "report.html").is_file()


def test_the_grids_the_schema_and_the_tables_come_along(installed: Path, tmp_path: Path) -> None:
    plan = json.loads(nightgrid(installed, tmp_path, "plan", "smoke", "--emulate", "2x8", "--json"))
    assert plan["summary"]["run"] == 20
    shipped = {path.name for path in (installed / "orchestrator/grid/shipped").iterdir()}
    assert {path.name for path in (ROOT / "grids").iterdir()} == shipped


def test_it_is_imported_by_its_name_and_has_types(installed: Path, tmp_path: Path) -> None:
    for package in ("nightgrid", "orchestrator", "workloads"):
        assert (installed / package / "py.typed").is_file()
    code = "import nightgrid; assert nightgrid.Grid.from_file('smoke'); print(nightgrid.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.stdout.startswith(str(installed)), done.stderr
