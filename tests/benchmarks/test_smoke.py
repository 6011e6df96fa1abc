"""Each benchmark runs at a size that says nothing about speed: contenders start, lines come out."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES, announced, main, takes_s
from benchmarks.setting import PROGRAMS, Setting

#: Those that start Ray, or several processes that import large libraries, take 13 s of CPU each and
#: more: `make bench` has them, and what they compute has tests of its own.
LONG = ("finetuning", "startup", "orchestration", "measuring", "grid")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in LONG])
def test_a_benchmark_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module = importlib.import_module(f"benchmarks.{name}")
    setting = Setting(scratch=tmp_path, peers_python=None, smoke=True, say=lambda _: None)
    lines, facts = module.run(setting)
    rates = [value for line in lines if line.unit for value in (*line.ours, *line.theirs)]
    assert rates and all(value > 0 for value in rates)
    json.dumps(facts)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_what_it_is(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.TITLE and module.__doc__ and callable(module.run)


def test_the_page_and_a_first_look_fit_their_time() -> None:
    assert sum(takes_s(name, quick=False) for name in NAMES) < 20 * 60
    assert sum(takes_s(name, quick=True) for name in NAMES) < 8 * 60
    first, *others = announced(NAMES, quick=False)
    assert first.endswith("minutes on two quiet cores:") and len(others) == len(NAMES)


def test_an_unknown_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "generatoin"])
    with pytest.raises(SystemExit):
        main()
    assert "there is command_line" in capsys.readouterr().err


def _read(program: Path) -> tuple[int, bool]:
    """Count the arguments that a program reads; say whether it takes any number after them."""
    count, open_ended = 0, False
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.argv":
            at = node.slice
            if isinstance(at, ast.Slice):
                open_ended = open_ended or at.upper is None
                after = at.upper or at.lower
                assert after is not None
                count = max(count, ast.literal_eval(after) - 1)
            else:
                count = max(count, ast.literal_eval(at))
    return count, open_ended


def _given(arguments: list[ast.expr]) -> int | None:
    """Count the arguments that a call gives; None where a name hides it."""
    count = 0
    for each in arguments:
        if not isinstance(each, ast.Starred):
            count += 1
        elif isinstance(each.value, ast.Tuple):
            inner = _given(each.value.elts)
            if inner is None:
                return None
            count += inner
        else:
            return None
    return count


def _calls() -> Iterator[tuple[str, str, int]]:
    """Each benchmark's program and the number of its arguments, where both stand in the call."""
    for file in sorted(PROGRAMS.parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setting.started":
                program = node.args[3]
                given = _given(node.args[4:])
                if isinstance(program, ast.Constant) and given is not None:
                    yield file.name, str(program.value), given


def test_a_contender_is_given_what_it_reads() -> None:
    calls = list(_calls())
    assert len(calls) >= 2
    wrong = []
    for benchmark, program, given in calls:
        count, open_ended = _read(PROGRAMS / program)
        if given != count and not (open_ended and given > count):
            wrong.append(f"{benchmark} gives {program} {given} arguments, which reads {count}")
    assert not wrong, "\n".join(wrong)
