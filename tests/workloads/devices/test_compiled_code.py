"""Compiled code on a node's disk: by software and card, for as long as somebody uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workloads.base import BadConfiguration
from workloads.devices import base, device_class
from workloads.devices.base import Compilations, compiled_directory, compiled_size_mib


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(base.COMPILED_DIRECTORY, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


def test_each_release_and_card_has_a_directory_that_stays(root: Path) -> None:
    first = compiled_directory("plugin-1.24.0-torch-2.10.0a0+git-HL-225")
    assert first is not None and Path(first).is_dir() and Path(first).parent == root
    assert compiled_directory("plugin-1.24.0-torch-2.10.0a0+git-HL-225") == first
    others = {
        compiled_directory("plugin-1.24.1-HL-225"),
        compiled_directory("plugin-1.24.0-HL-325"),
    }
    assert len({first, *others}) == 3
    odd = compiled_directory("../../etc/a b")
    assert odd is not None and Path(odd).parent == root


def test_what_nobody_has_used_for_a_month_is_removed(root: Path) -> None:
    old, used = (compiled_directory(name) for name in ("old", "used"))
    assert old is not None and used is not None
    for directory in (old, used):
        (Path(directory) / "recipe").touch()
        os.utime(directory, (1e9, 1e9))
    compiled_directory("used")
    assert not Path(old).exists() and (Path(used) / "recipe").exists()


def test_a_disk_that_takes_nothing_costs_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(base.COMPILED_DIRECTORY, str(tmp_path / "file"))
    assert compiled_directory("plugin") is None
    assert compiled_directory("") is None and device_class("cpu").compiler() == ""


def test_the_size_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_size_mib() == 8192
    monkeypatch.setenv(base.COMPILED_SIZE, "100")
    assert compiled_size_mib() == 100
    monkeypatch.setenv(base.COMPILED_SIZE, "0")
    with pytest.raises(BadConfiguration, match="NIGHTGRID_COMPILED_MIB='0'"):
        compiled_size_mib()


def test_a_row_says_cold_or_cached() -> None:
    known = Compilations(graphs=3, compile_s=2.0)
    assert Compilations(graphs=5, compile_s=32.5).since(known).temperature() == (
        "cold: 2 graphs compiled in 30.5 s"
    )
    assert known.since(known).temperature() == "cached: every graph was known"
    assert Compilations(graphs=5).since(known).temperature() == ""
