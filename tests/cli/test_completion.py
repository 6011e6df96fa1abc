"""Shell completion, asked of real shells: commands, options, choices, grid files, names of runs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from patience import patience

from orchestrator.cli.completion import SHELLS, script
from orchestrator.cli.main import COMMANDS, full_parser


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("completion")
    paths = {shell: directory / f"nightgrid.{shell}" for shell in SHELLS}
    for shell, path in paths.items():
        path.write_text(script(full_parser(), shell))
    return paths


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("smoke.yaml", "sleep.yml", "notes.txt"):
        (tmp_path / name).write_text("")
    for run in ("smoke", "monday", "with space"):
        (tmp_path / "results" / run / "rows").mkdir(parents=True)
    (tmp_path / "results" / "no-run").mkdir()
    (tmp_path / "elsewhere" / "tuesday" / "rows").mkdir(parents=True)
    return tmp_path


def offered(shell: str, path: Path, words: list[str], place: Path) -> list[str]:
    """The shell's offers after these words; the last is being typed."""
    if shutil.which(shell) is None:
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


#: What is typed, and what is offered for its last word.
OFFERS = {
    "nightgrid re": ["report", "repro"],
    "nightgrid run --retry-fa": ["--retry-failed"],
    "nightgrid report --format ven": ["vendor"],
    "nightgrid plan s": ["sleep.yml", "smoke.yaml"],  # YAML files and no others
    "nightgrid plan no": [],
    "nightgrid report m": ["monday"],
    "nightgrid compare m": ["monday"],
    "nightgrid compare smoke m": ["monday"],
    "nightgrid query 'select 1' --run m": ["monday"],
    "nightgrid report --results elsewhere t": ["tuesday"],
}


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize("typed", OFFERS)
def test_words_are_completed(shell: str, typed: str, scripts: dict[str, Path], place: Path) -> None:
    words = typed.split(" ") if shell == "fish" else shlex.split(typed)
    assert sorted(offered(shell, scripts[shell], words, place)) == OFFERS[typed]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_all_commands_are_offered(shell: str, scripts: dict[str, Path], place: Path) -> None:
    assert set(COMMANDS) <= set(offered(shell, scripts[shell], ["nightgrid", ""], place))


def test_runs_are_looked_for_where_the_environment_says(
    scripts: dict[str, Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTGRID_RESULTS", str(place / "elsewhere"))
    assert offered("bash", scripts["bash"], ["nightgrid", "report", ""], place) == ["tuesday"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_takes_its_script(scripts: dict[str, Path], place: Path) -> None:
    code = (
        "compdef() { :; }; compadd() { shift; print -l ${(P)1}; }; compinit() { :; }\n"
        f'source "{scripts["zsh"]}"\nwords=(nightgrid report --results elsewhere "")\n'
        "_nightgrid_runs"
    )
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, cwd=place)
    assert done.returncode == 0 and "tuesday" in done.stdout.split(), done.stderr
