"""Benchmarks give their contenders as many arguments as these read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.setting import PROGRAMS


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
