"""Weights & Biases: the ledger of what is written, kept on whatever its package does there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from measurements import row

from orchestrator.trackers import TRACKERS
from orchestrator.trackers.base import tracked


class Run:
    """A run of the package's; it refuses figures if it is told to."""

    def __init__(self, ended: list[int], refuses: bool) -> None:
        self.summary: dict[str, float] = {}
        self.ended = ended
        if refuses:
            del self.summary

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_run_is_noted_where_the_package_made_no_directory(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is known to the next connection; what is refused is not, and is ended."""
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
