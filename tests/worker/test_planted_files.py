"""Links, pipes, devices and endless files in the place of those that we read or write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from measurements import row
from odd_files import a_device, a_link_to_a_device, a_link_to_the_kernel, a_pipe, a_sparse_file

from orchestrator.cli.main import main
from orchestrator.core.errors import NightgridError, StoreError
from orchestrator.report.run_report import write_aside
from orchestrator.store.store import Store
from orchestrator.watch.notify import hook_of
from workloads.base import DataMissing
from workloads.data.records import records
from workloads.data.shapes import Example, write_json_lines
from workloads.inspection.checkpoints import index_shards, read_config
from workloads.inspection.headers import read_header
from workloads.training.saved_adapters import find_adapter

PRECIOUS = "what belongs to somebody else\n"


ODD = [a_pipe, a_link_to_a_device, a_link_to_the_kernel, a_sparse_file, a_device]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text(PRECIOUS)
    return path


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("odd", ODD)
def test_readers_refuse_at_once_and_name_the_file(
    tmp_path: Path, odd: Callable[[Path], None]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = model / "config.json"
    odd(config)
    hook = tmp_path / "hook"
    odd(hook)
    for read in (
        lambda: read_config(model),
        lambda: index_shards(config),
        lambda: read_header(config),
        lambda: hook_of(f"@{hook}"),
    ):
        with pytest.raises((DataMissing, NightgridError), match=r"config\.json|hook"):
            read()
    if odd is not a_sparse_file:  # examples may be many, and are read line by line
        with pytest.raises(DataMissing, match="hook"):
            list(records(hook))


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["tokenizer.json", "adapter_model.safetensors"])
def test_a_model_s_directory_has_nothing_that_libraries_would_wait_for(
    tmp_path: Path, odd: Callable[[Path], None], name: str
) -> None:
    """They open what they find beside config.json, by names that we do not know; weights may be of
    any size."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text("{}")
    odd(tmp_path / name)
    (tmp_path / "to nowhere").symlink_to(tmp_path / "missing")
    if odd is a_sparse_file and name.endswith(".safetensors"):
        assert read_config(tmp_path) == {}
        return
    for read in (lambda: read_config(tmp_path), lambda: find_adapter(str(tmp_path))):
        with pytest.raises(DataMissing, match=name):
            read()


@pytest.mark.parametrize("odd", ODD)
def test_commands_end_at_a_grid_or_a_run_that_is_none(
    tmp_path: Path, odd: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid.yaml"
    odd(grid)
    for command in ("plan", "run"):
        assert main([command, str(grid), "--results", str(tmp_path / "results")]) == 2
        assert f"{grid}" in capsys.readouterr().err
    with Store(tmp_path / "results", "night") as store:
        store.append(row())
    for name in ("status.json", "options.json", "begun.log", ".reserve", "run.id", "grid.yaml"):
        (store.path / name).unlink(missing_ok=True)
        odd(store.path / name)
    results = ["--results", str(tmp_path / "results")]
    assert main(["status", "night", *results]) == 0
    assert "1 final row" in capsys.readouterr().out
    assert main(["report", "night", "--format", "md", *results]) == 0
    assert main(["run", "--resume", *results]) in (2, 4)
    assert "grid.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["driver.lock", ".driver.lock.guard", "begun.log", "run.id"])
def test_a_writer_meets_odd_files_without_waiting(
    tmp_path: Path, odd: Callable[[Path], None], name: str
) -> None:
    store = Store(tmp_path, "night")
    store.tables_path.mkdir(parents=True)
    odd(store.path / name)
    try:
        with store:
            assert len(store.run_id) == 12
            store.append(row())
    except StoreError as error:
        assert name in str(error) or "sparse" in odd.__name__
        assert name in ("driver.lock", ".driver.lock.guard")
    else:
        assert len(store.measurements()) == 1


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_what_is_written_follows_no_planted_link(
    tmp_path: Path, precious: Path, plant: Callable[[Path, Path], None]
) -> None:
    store = Store(tmp_path, "night")
    store.tables_path.mkdir(parents=True)
    measurement = row()
    with store:
        name = store.append(measurement).name
        plant(precious, store.tables_path / f".{name}.partial")
        store.append(measurement)
        plant(precious, store.path / f".status.json.{os.getpid()}.aside")
        store.write_file("status.json", "{}")
    plant(precious, store.path / f".report.html.{os.getpid()}.tmp")
    write_aside(store.path / "report.html", "page")
    plant(precious, tmp_path / f".sample.json.{os.getpid()}.partial")
    write_json_lines(tmp_path / "sample.json", [Example(content="a")])
    assert precious.read_text() == PRECIOUS
    assert (store.path / "report.html").read_text() == "page"
    assert len(store.measurements()) == 1


def test_locks_follow_no_planted_link(tmp_path: Path, precious: Path) -> None:
    """The guard is opened to be locked, which through a link would create another file."""
    store = Store(tmp_path, "night")
    store.tables_path.mkdir(parents=True)
    guard = store.path / ".driver.lock.guard"
    guard.symlink_to(tmp_path / "created")
    with pytest.raises(StoreError, match=r"guard: it is a symbolic link"), store:
        pass
    assert not (tmp_path / "created").exists()
