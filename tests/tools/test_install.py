"""The installation of the project's environment, without any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import install


@pytest.mark.parametrize("fails", [False, True])
def test_the_program_is_compiled_once_it_is_installed(fails, tmp_path, monkeypatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 3 if fails else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path)])
    assert install.main() == (3 if fails else 0)
    compiled = [command for command in commands if "compileall" in command]
    modules = [str(install.ROOT / name) for name in ("orchestrator", "workloads")]
    expected = [] if fails else [[str(python), "-m", "compileall", "-qq", *modules]]
    assert compiled == expected and "install" in commands[0]
