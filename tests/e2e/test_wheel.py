"""The wheel, unpacked in a directory of its own, and a package beside it that adds to every list
that a grid may choose from: both run there.

Each addition takes one file of ``outside/`` and one entry point, and no file of ours:

    workload   outside_workload.py   1 file    nightgrid.workloads
    engine     outside_engine.py     1 file    nightgrid.engines
    device     outside_npu.py        1 file    nightgrid.devices
    technique  outside_technique.py  1 file    nightgrid.techniques
    metric     outside_metric.py     1 file    nightgrid.metrics
    task       outside_task.py       1 file    nightgrid.tasks
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from patience import patience
from safetensors.numpy import save_file

pytestmark = pytest.mark.slow  # a wheel is built, and runs in a process of its own

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parent / "outside"
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


#: As the wheel's entry point, and by the package's name.
OUTSIDE_THE_CHECKOUT = """
import contextlib, sys
import orchestrator, nightgrid
from MODULE import FUNCTION as command
for package in (orchestrator, nightgrid):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
assert nightgrid.Grid.from_file("smoke")
assert command(["init", "--model", "tiny-chatglm3", "--accelerator", "CPU"]) == 0
for name, options in (("grid.yaml", []), ("smoke", ["--emulate", "2x8"])):
    with open(f"{name}.json", "w") as file, contextlib.redirect_stdout(file):
        assert command(["plan", name, "--json", *options]) == 0
"""


def test_a_wheel_plans_a_first_grid_and_a_shipped_one(installed: Path, tmp_path: Path) -> None:
    """Grids, schema and tables come along."""
    [about] = installed.glob("*.dist-info/entry_points.txt")
    points = ConfigParser()
    points.read(about)
    module, _, function = points["console_scripts"]["nightgrid"].partition(":")
    code = OUTSIDE_THE_CHECKOUT.replace("MODULE", module).replace("FUNCTION", function)
    done = subprocess.run(
        [sys.executable, "-c", code, str(installed)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    planned = {
        path.stem: json.loads(path.read_text())["summary"]["run"]
        for path in tmp_path.glob("*.json")
    }
    assert planned["grid.yaml"] > 0 and planned["smoke"] == 20
    shipped = {path.name for path in (installed / "orchestrator/grid/shipped").iterdir()}
    assert {path.name for path in (ROOT / "grids").iterdir()} == shipped
    for package in ("nightgrid", "orchestrator", "workloads"):
        assert (installed / package / "py.typed").is_file()


# ---------------------------------------------------------------- a package outside it

POINTS = {
    "nightgrid.workloads": "outside-product = outside_workload:SPEC",
    "nightgrid.engines": "outside-engine = outside_engine:SPEC",
    "nightgrid.devices": "npu = outside_npu:SPEC",
    "nightgrid.techniques": "gradient-signs = outside_technique:SignOfGradients",
    "nightgrid.metrics": "last_step_loss = outside_metric:SPEC",
    "nightgrid.tasks": "matrix = outside_task:SPEC",
}

#: A run, and what the report and the comparison say of them, in one process.
COMMANDS = """
import contextlib, json, shutil
from pathlib import Path
import orchestrator
from orchestrator.cli.main import main
assert main(["run", "grid.yaml", "--in-process", "--quiet", "--run", "after"]) == 0
shutil.copytree("results/after", "results/before")
# Whatever else runs on this machine may disturb these rows: flags are left aside.
compare = ["compare", "before", "after", "--all", "--json", "--allow", "flags"]
for typed in (["report", "after", "--json"], compare):
    with open(typed[0] + ".json", "w") as file, contextlib.redirect_stdout(file):
        assert main(typed) == 0
from orchestrator.analysis.rankings import rankings_of
from orchestrator.analysis.selection import settings_of
from orchestrator.core.labels import labels_of
from orchestrator.store.store import Store
from workloads.training.techniques import all_techniques
rows = Store.existing(Path("results"), "after").measurements()
labels = {job_id: str(label) for job_id, label in labels_of(rows).items()}
order = [kind.name for kind in all_techniques()]
rankings = [
    {
        "parameters": dict(ranking.setting.parameters),
        "leaders": {one.metric.name: one.row.job_id for one in ranking.leaders},
    }
    for ranking in rankings_of(rows, settings_of(rows))
]
more = {"labels": labels, "order": order, "rankings": rankings, "from": orchestrator.__file__}
Path("more.json").write_text(json.dumps(more))
"""


def grid(model: Path) -> dict[str, object]:
    """Two experiments, which use all six additions."""
    products = {
        "name": "products",
        "workload": "outside-product",
        "model": str(model),
        "axes": {"size": [8, 16]},
    }
    signs = {
        "name": "signs",
        "workload": "finetuning",
        "model": "tiny-chatglm3",
        "method": "full",
        "learning_rate": 0.02,  # enough to tell the two apart
        "steps": 3,
        "samples": 4,
        "max_length": 32,
        "axes": {"gradient_signs": [False, True]},
    }
    return {
        "name": "outside",
        "defaults": {"accelerator": "NPU", "engine": "outside-engine", "precision": "fp32"},
        "measure": {
            "repeat_flagged": 0,
            "warmup": 0,
            "min_repeats": 2,
            "max_repeats": 2,
            "time_limit_s": 5,
        },
        "experiments": [products, signs],
    }


@pytest.fixture(scope="module")
def outside(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of the wheel with a package outside it, and what is reported of that."""
    place = tmp_path_factory.mktemp("outside")
    information = place / "outside-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: outside\nVersion: 1\n")
    points = "".join(f"[{group}]\n{point}\n" for group, point in POINTS.items())
    (information / "entry_points.txt").write_text(points)
    model = place / "matrix"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["OutsideMatrix"]}')
    save_file({"matrix": np.ones((16, 16), np.float32)}, model / "model.safetensors")
    (place / "grid.yaml").write_text(yaml.safe_dump(grid(model)))
    environment = {**os.environ, "PYTHONPATH": f"{place}:{FILES}:{installed}"}
    for name in ("RAY_ADDRESS", "NIGHTGRID_RESULTS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = {
        name: json.loads((place / f"{name}.json").read_text())
        for name in ("report", "compare", "more")
    }
    page = place / "results" / "after" / "report.html"
    return SimpleNamespace(**said, rows=said["report"]["rows"], page=page)


def of(rows: list[dict], workload: str, setting: str) -> dict[object, dict]:
    named = f"parameters.{setting}"
    return {row[named]: row for row in rows if row["workload"] == workload}


def test_all_of_them_run(outside: SimpleNamespace, installed: Path) -> None:
    assert Path(outside.more["from"]).is_relative_to(installed)
    assert outside.page.is_file()
    assert len(outside.rows) == 4
    said = {(row["state"], row["engine"], row["accelerator"]) for row in outside.rows}
    assert said == {("SUCCEEDED", "outside-engine", "NPU")}


def test_the_metric_is_in_rows_rankings_and_comparisons(outside: SimpleNamespace) -> None:
    named = "workload_metrics.last_step_loss"
    found = {row["job_id"]: row[named] for row in outside.rows if named in row}
    trained = {row["job_id"] for row in outside.rows if row["workload"] == "finetuning"}
    assert found.keys() == trained and all(value > 0 for value in found.values())
    leaders = [each["leaders"].get("last_step_loss") for each in outside.more["rankings"]]
    assert [job for job in leaders if job] == [min(found, key=lambda job: found[job])]
    told = [
        (figure["unit"], figure["better"])
        for change in outside.compare["changes"]
        for figure in change["figures"]
        if figure["name"] == "last_step_loss"
    ]
    assert told == [("nats", "lower")] * len(trained)


def test_the_workload_reports_a_figure_of_its_own(outside: SimpleNamespace) -> None:
    rows = of(outside.rows, "outside-product", "size")
    assert {n: row["workload_metrics.mean_entry"] for n, row in rows.items()} == {8: 8, 16: 16}
    assert {row["throughput_unit"] for row in rows.values()} == {"products/s"}
    figures = {
        change["parameters"]["size"]: change["figures"]
        for change in outside.compare["changes"]
        if change["workload"] == "outside-product"
    }
    told = {"name": "mean_entry", "title": "mean entry of the product", "unit": "units"}
    told |= {"better": "higher", "improved": None}
    assert figures == {n: [{**told, "before": n, "after": n}] for n in (8, 16)}


def test_the_technique_acts_and_is_a_choice(outside: SimpleNamespace) -> None:
    order = outside.more["order"]
    place = order.index("gradient-signs")
    assert order[place + 1] == "compilation" and "optimizers" in order[:place]
    rows = of(outside.rows, "finetuning", "gradient_signs")
    plain, signed = rows[False], rows[True]
    assert signed["details.gradient_signs"] == "taken"
    assert "details.gradient_signs" not in plain
    loss = "workload_metrics.first_batch_loss_after"
    assert signed[loss] != pytest.approx(plain[loss], rel=1e-4)
    labels = outside.more["labels"]
    assert "no gradient signs" in labels[plain["job_id"]]
    assert "gradient signs" in labels[signed["job_id"]].replace("no gradient signs", "")
    rankings = [each["parameters"] for each in outside.more["rankings"]]
    assert len(rankings) == 3 and sum("method" in each for each in rankings) == 1
    assert not any("gradient_signs" in each for each in rankings)
