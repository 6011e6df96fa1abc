"""Tools of vendors that answer as the real ones, and NVIDIA's library."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import nvml  # noqa: F401 - a fixture


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:

    def put(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put
