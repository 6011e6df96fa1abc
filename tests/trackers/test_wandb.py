"""Weights & Biases: the ledger of what is written, kept on whatever its package does there."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from measurements import row

from orchestrator.trackers.base import TRACKERS, tracked


class Run:
    def __init__(self, ended: list[int], refuses: bool) -> None:
        self.summary: dict[str, float] = {}
        self.ended = ended
        if refuses:
            del self.summary

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_run_is_noted_where_the_package_made_no_directory(refuses, tmp_path, monkeypatch) -> None:
    ended: list[int] = []
    package = SimpleNamespace(
        login=lambda **_: True,
        Settings=lambda **_: None,
        init=lambda **_: Run(ended, refuses),
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    one = tracked(row(1))
    connection = TRACKERS["wandb"].connect("there", "night", tmp_path / "night")
    if refuses:
        with pytest.raises(AttributeError, match="summary"):
            connection.write(one)
    else:
        connection.write(one)
    again = TRACKERS["wandb"].connect("there", "night", tmp_path / "night")
    assert again.has(one.attempt) is not refuses
    assert ended == [int(refuses)]


@pytest.mark.parametrize(
    ("login", "variable", "mode"),
    [(True, "", None), (False, "", "offline"), (False, "disabled", None)],
)
def test_without_a_key_files_alone_are_written(login, variable, mode, tmp_path, monkeypatch):
    asked: dict[str, object] = {}

    def init(**given: object) -> Run:
        asked.update(given)
        return Run([], refuses=False)

    package = SimpleNamespace(login=lambda **_: login, Settings=lambda **_: None, init=init)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setenv("WANDB_MODE", variable)
    one = replace(row(1), model="Org/Model", emulated=True, random_weights=False)
    TRACKERS["wandb"].connect("there", "night", tmp_path).write(tracked(one))
    assert asked["mode"] == mode
    assert asked["tags"] == ["emulated"]
    config = asked["config"]
    assert isinstance(config, dict) and config["model"] == "Org/Model"
    assert (config["emulated"], config["random_weights"]) == ("true", "false")
