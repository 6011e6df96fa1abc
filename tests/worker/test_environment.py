"""Provenance: versions without imports, git where there is git, silence where there is not."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from odd_files import a_program

from orchestrator.core.job import Accelerator
from orchestrator.worker import environment
from orchestrator.worker.environment import (
    driver_version,
    git_state,
    provenance,
    versions,
)

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.GIT_COMMIT_VARIABLE, raising=False)
    monkeypatch.delenv(environment.GIT_DIRTY_VARIABLE, raising=False)


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    package = tmp_path / "repo" / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text("x = 1\n")
    (package / ".gitignore").write_text("*.out\n")
    git(tmp_path / "repo", "init", "-q")
    git(tmp_path / "repo", "add", ".")
    git(tmp_path / "repo", "commit", "-q", "-m", "one")
    return package


def test_versions_name_what_is_installed_and_nothing_else() -> None:
    found = versions()
    import pyarrow

    assert found["python"] == platform.python_version()
    assert found["pyarrow"] == pyarrow.__version__
    assert found["cpu"] and found["host"] and found["kernel"]
    assert all(isinstance(value, str) and value for value in found.values())
    assert "habana-torch-plugin" not in found or shutil.which("hl-smi")


def test_versions_import_nothing_heavy() -> None:
    code = (
        "import sys; from orchestrator.worker.environment import provenance; provenance();"
        "print([m for m in ('torch', 'ray', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@needs_git
@pytest.mark.parametrize(
    ("name", "dirty"),
    [
        (None, False),
        ("module.py", True),
        ("new.py", True),
        ("../elsewhere.py", True),
        ("x.out", False),
    ],
)
def test_a_tree_is_its_commit_and_dirty_by_what_git_does_not_ignore(
    repository: Path, name: str | None, dirty: bool
) -> None:
    if name is not None:
        (repository / name).write_text("x = 2\n")
    head = git(repository, "rev-parse", "HEAD")
    assert git_state(repository) == (head, dirty)


@needs_git
def test_a_copy_installed_inside_somebodys_repository_has_no_commit(repository: Path) -> None:
    """A virtual environment in another project does not lend us that project's commit."""
    installed = repository / "venv" / "site-packages" / "orchestrator"
    installed.mkdir(parents=True)
    (installed / "module.py").write_text("")
    assert git_state(installed) == (None, None)


def test_neither_no_repository_nor_no_git_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert git_state(tmp_path) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == (None, None)
    assert provenance().git_commit is None


def test_submission_tells_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(environment.GIT_COMMIT_VARIABLE, "0123abc")
    assert git_state(tmp_path) == ("0123abc", None)
    monkeypatch.setenv(environment.GIT_DIRTY_VARIABLE, "1")
    assert git_state(tmp_path) == ("0123abc", True)
    monkeypatch.setenv(environment.GIT_COMMIT_VARIABLE, "$(rm -rf /)")
    assert git_state(tmp_path) == (None, None)


def test_driver_versions_come_from_the_vendors_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    a_program(tmp_path / "nvidia-smi", "echo 550.54.15; echo 550.54.15")
    assert driver_version(Accelerator.GPU) == "550.54.15"
    assert driver_version(Accelerator.CPU) is None
    a_program(tmp_path / "hl-smi", "exit 3")
    assert driver_version(Accelerator.HPU) is None
    monkeypatch.setattr(environment, "TIMEOUT_S", 0.2)
    for script in ("true", "exec sleep 60"):
        a_program(tmp_path / "nvidia-smi", script)
        assert driver_version(Accelerator.GPU) is None
