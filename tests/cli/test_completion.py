"""Shell completion, asked of real shells: commands, options, choices, grid files, names of runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from patience import patience

from orchestrator.cli.completion import SHELLS, script
from orchestrator.cli.main import COMMANDS, full_parser

HERE = {"bash": "bash", "zsh": "zsh", "fish": "fish"}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, in a file."""
    directory = tmp_path_factory.mktemp("completion")
    paths = {shell: directory / f"nightgrid.{shell}" for shell in SHELLS}
    for shell, path in paths.items():
        path.write_text(script(full_parser(), shell))
    return paths


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with grids and runs."""
    for name in ("smoke.yaml", "sleep.yml", "notes.txt"):
        (tmp_path / name).write_text("")
    for run in ("smoke", "monday", "with space"):
        (tmp_path / "results" / run / "rows").mkdir(parents=True)
    (tmp_path / "results" / "no-run").mkdir()
    (tmp_path / "elsewhere" / "tuesday" / "rows").mkdir(parents=True)
    return tmp_path


def asked(shell: str, path: Path, words: list[str], place: Path) -> list[str]:
    """The shell's offers after these words; the last is being typed."""
    if shutil.which(HERE[shell]) is None:
        pytest.skip(f"no {shell} on this machine")
    if shell == "bash":
        code = (
            f'source "{path}"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
            'COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
            'COMPREPLY=(); _shtab_nightgrid; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        command = ["bash", "--norc", "-c", code, "bash", *words]
    else:
        line = " ".join(words)
        command = ["fish", "--no-config", "-c", f'source "{path}"; complete -C "{line}"']
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, timeout=patience(60))
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line.split("\t")[0].strip() for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_commands_are_completed(shell: str, scripts: dict[str, Path], place: Path) -> None:
    offered = asked(shell, scripts[shell], ["nightgrid", ""], place)
    assert set(COMMANDS) <= set(offered)
    assert set(asked(shell, scripts[shell], ["nightgrid", "re"], place)) == {"report"}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_options_and_choices_are_completed(
    shell: str, scripts: dict[str, Path], place: Path
) -> None:
    words = ["nightgrid", "run", "--ret"]
    assert asked(shell, scripts[shell], words, place) == ["--retry-failed"]
    words = ["nightgrid", "report", "--format", "ven"]
    assert asked(shell, scripts[shell], words, place) == ["vendor"]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_grid_files_are_completed(shell: str, scripts: dict[str, Path], place: Path) -> None:
    offered = asked(shell, scripts[shell], ["nightgrid", "plan", "s"], place)
    assert set(offered) == {"smoke.yaml", "sleep.yml"}
    assert asked(shell, scripts[shell], ["nightgrid", "plan", "no"], place) == []


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize(
    "words", [["report"], ["compare"], ["compare", "smoke"], ["query", "select 1", "--run"]]
)
def test_names_of_runs_are_completed(
    shell: str, words: list[str], scripts: dict[str, Path], place: Path
) -> None:
    if shell == "fish":
        words = [word.replace("select 1", "'select 1'") for word in words]
    offered = asked(shell, scripts[shell], ["nightgrid", *words, "m"], place)
    assert offered == ["monday"]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_runs_are_looked_for_where_the_line_says(
    shell: str, scripts: dict[str, Path], place: Path
) -> None:
    words = ["nightgrid", "report", "--results", "elsewhere", "t"]
    assert asked(shell, scripts[shell], words, place) == ["tuesday"]


def test_runs_are_looked_for_where_the_environment_says(
    scripts: dict[str, Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTGRID_RESULTS", str(place / "elsewhere"))
    assert asked("bash", scripts["bash"], ["nightgrid", "report", ""], place) == ["tuesday"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_takes_its_script(scripts: dict[str, Path], place: Path) -> None:
    code = (
        "compdef() { :; }; compadd() { shift; print -l ${(P)1}; }; compinit() { :; }\n"
        f'source "{scripts["zsh"]}"\nwords=(nightgrid report --results elsewhere "")\n'
        "_nightgrid_runs"
    )
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, cwd=place)
    assert done.returncode == 0 and "tuesday" in done.stdout.split(), done.stderr
