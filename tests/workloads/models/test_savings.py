"""The saving of what has a name now, as the environment and the disk have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workloads.models.products import ATTEMPT, ORIGIN, SAVED_BY, Saving, saving_of


def save(root: Path, name: str, saved_by: str, attempt: int) -> None:
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ORIGIN).write_text(json.dumps({SAVED_BY: saved_by, ATTEMPT: attempt}))


def test_a_name_is_looked_up_anew_wherever_models_are_kept_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTGRID_MODELS", str(tmp_path / "one"))
    assert saving_of("model", "mine") == Saving()
    save(tmp_path / "one", "mine", "run-job", 1)
    assert saving_of("model", "mine") == Saving("run-job", 1)
    save(tmp_path / "one", "mine", "run-job", 2)
    assert saving_of("model", "mine") == Saving("run-job", 2)
    monkeypatch.setenv("NIGHTGRID_MODELS", str(tmp_path / "other"))
    assert saving_of("model", "mine") == Saving()
    monkeypatch.setenv("NIGHTGRID_MODELS", str(tmp_path / "one"))
    assert saving_of("model", "mine") == Saving("run-job", 2)
    save(tmp_path, "elsewhere", "run-other", 3)
    assert saving_of("model", str(tmp_path / "elsewhere")) == Saving("run-other", 3)
    assert saving_of("adapter", "mine") == Saving()
