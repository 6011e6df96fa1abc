"""No command of the schedule is forgotten: a generator that nobody reads does nothing."""

from __future__ import annotations

import ast
import re
from typing import get_args

import pytest
from source_tree import modules

from orchestrator.core import events

COMMANDS = {"Command", *(kind.__name__ for kind in get_args(events.Command))}
#: Beside the schedule and its parts: what carries their commands out, or looks at them.
AROUND = {"simulate.py", "simulator.py", "invariants.py"}
SOURCES = {
    path.name: path.read_text(encoding="utf-8")
    for path in modules("orchestrator/scheduler")
    if path.name not in AROUND
}


_YIELD = (ast.Yield, ast.YieldFrom)


def functions(source: str) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]


def gives_commands(function: ast.FunctionDef) -> bool:
    """Tell by its annotation if a function yields commands or returns one."""
    returns = ast.unparse(function.returns) if function.returns else ""
    found = re.match(r"(?:(?:Iterator|Iterable|Generator)\[)?(?:events\.)?(\w+)", returns)
    return found is not None and found[1] in COMMANDS


GIVING = {f.name for source in SOURCES.values() for f in functions(source) if gives_commands(f)}


def forgotten(source: str) -> list[str]:
    """Calls of functions that give commands, which stand behind no ``yield from`` or ``yield``.

    A function that gives none itself (``handle``) may hand commands on, but not drop them. A method
    of ``self`` is the one of the same module, where that has one of its name.
    """
    own = {function.name: gives_commands(function) for function in functions(source)}
    found = []
    for function in functions(source):
        parents = {c: n for n in ast.walk(function) for c in ast.iter_child_nodes(n)}
        generator = any(isinstance(node, _YIELD) for node in parents)
        for call, parent in parents.items():
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    gives = own.get(name, name.removeprefix("_") in GIVING)
                case ast.Call(func=ast.Attribute(value=ast.Attribute() | ast.Name(), attr=name)):
                    gives = name in GIVING
                case _:
                    continue
            read = isinstance(parent, _YIELD if generator else (*_YIELD, ast.Return))
            if gives and not read and (gives_commands(function) or isinstance(parent, ast.Expr)):
                found.append(f"{function.name}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_every_command_is_read(name: str) -> None:
    assert forgotten(SOURCES[name]) == []


@pytest.mark.slow
def test_each_forgotten_yield_is_found() -> None:
    """Without any one ``yield`` of the real modules, the law above is broken."""
    names = {name.strip("_") for name in GIVING}
    yielded = [
        (source, text)
        for source in SOURCES.values()
        for text in sorted(set(re.findall(r"yield (?:from )?(?:self|pool)\.[\w.]+\(", source)))
        if text.rpartition(".")[2].strip("_(") in names
    ]
    assert len(yielded) > 60
    for source, text in yielded:
        assert forgotten(source.replace(text, re.sub(r"^yield (from )?", "", text))), text
