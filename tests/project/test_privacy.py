"""Tests use what the product offers: no private name of another module is reached."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
from source_tree import ROOT, modules

#: Documented in spite of the underscore: of named tuples, notebooks and ``os``. And argparse's list
#: of options, which has no other name.
PUBLIC = {"_replace", "_repr_html_", "_exit", "_actions"}
#: Functions that take the name of an attribute.
NAMING = {"setattr", "delattr", "getattr", "hasattr", "object", "patch"}
_DEFINITION = re.compile(
    r"^ *(?:(?:async )?def |class |self\.)?(_[a-zA-Z]\w*)\b *[:=(]", re.MULTILINE
)
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_private(name: str) -> bool:
    """A name with one underscore in front."""
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a module gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            names = [node.name]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr] if _is_own(node.value) else []
        else:
            continue
        yield from filter(is_private, names)


def _is_own(owner: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``."""
    if isinstance(owner, ast.Call):
        return isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def reached(tree: ast.AST, foreign: set[str], own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of another module: imported, read of an object, written
    in text for ``setattr`` and the like, or inherited."""
    for node in ast.walk(tree):
        names: Iterable[str] = ()
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, each.name) for each in node.names if is_private(each.name))
        elif isinstance(node, ast.Attribute):
            names = () if _is_own(node.value) and node.attr in own else (node.attr,)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            texts = (each.value for each in node.args if isinstance(each, ast.Constant))
            if called in NAMING:
                names = (text.rpartition(".")[2] for text in texts if isinstance(text, str))
        yield from ((node.lineno, name) for name in names if is_private(name) and name in foreign)


@cache
def of_the_product() -> set[str]:
    """The private names that the product and its tools define; read as text, which is quicker."""
    paths = [path for top in ("orchestrator", "workloads", "tools") for path in modules(top)]
    texts = (path.read_text(encoding="utf-8") for path in paths)
    return {name for text in texts for name in _DEFINITION.findall(text)}


@pytest.mark.slow
def test_no_test_reaches_a_private_name_of_another_module() -> None:
    trees = {path: ast.parse(path.read_text()) for path in modules("tests")}
    own = {name for tree in trees.values() for name in defined(tree)}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in reached(tree, of_the_product(), own)
    ]
    assert not found, "use what is public, or make it public:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from orchestrator.driver.run import _hidden",
        "driver._hidden()",
        "case.driver._hidden = 1",
        'monkeypatch.setattr(driver, "_hidden", 1)',
        'monkeypatch.setattr("orchestrator.driver.run._hidden", 1)',
        'patch.object(Driver, "_hidden")',
        "class Mine(Driver):\n    def act(self): return self._hidden",
        "class Mine(Driver):\n    def act(self): return super()._hidden()",
    ],
)
def test_every_way_to_reach_a_private_name_is_seen(source: str) -> None:
    tree = ast.parse(source)
    assert [name for _, name in reached(tree, {"_hidden"}, set())] == ["_hidden"]
    assert not list(reached(ast.parse(source.replace("_hidden", "shown")), {"_hidden"}, set()))
    mine = ast.parse("class Mine:\n    _hidden = 1\n    def act(self): return self._hidden")
    assert not list(reached(mine, {"_hidden"}, set(defined(mine))))
