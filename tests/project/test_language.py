"""Docstrings name their subject first, and tests reach no private name of another module.

A test that does holds the code in its present shape, and may pass while what is offered is broken.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from source_tree import PRODUCT, modules, nodes_of, place, syntax

QUESTION_WORDS = ["What", "Which", "Whether", "Who", "Whom", "Whose", "How", "Why", "Where", "When"]
_QUESTION = re.compile(rf"\s*({'|'.join(QUESTION_WORDS)})\b")


def questions(nodes: list[ast.AST]) -> list[str]:
    """The docstrings of modules, classes, functions and fields that open with a question word, as
    ``line: text``; that of a test is a sentence."""
    found = []
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if _QUESTION.match(text):
                    if not getattr(node, "name", "").startswith("test_"):
                        found.append(f"{statement.lineno}: {text.strip().splitlines()[0]}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("package", ["orchestrator", "workloads", "benchmarks", "tests", "tools"])
def test_no_docstring_opens_with_a_question_word(package: str) -> None:
    found = [
        f"{place(path)}:{line}" for path in modules(package) for line in questions(syntax(path))
    ]
    assert not found, "open with a verb or a noun phrase instead:\n" + "\n".join(found)


def test_a_question_word_is_found_wherever_a_docstring_may_stand() -> None:
    for word in QUESTION_WORDS:
        source = f'''"""{word} module."""
class A:
    """{word} class."""
    x = 1
    """{word} field."""
async def g():
    """
    {word} coroutine."""
def h():
    """{word}ever is no question word."""
'''
        kinds = sorted(question.split()[2] for question in questions(nodes_of(source)))
        assert kinds == ["class.", "coroutine.", "field.", "module."], word


#: Documented in spite of the underscore: of named tuples, notebooks and ``os``. And argparse's list
#: of options, which has no other name.
PUBLIC = {"_replace", "_repr_html_", "_exit", "_actions"}
#: Functions that take the name of an attribute.
NAMING = {"setattr", "delattr", "getattr", "hasattr", "object", "patch"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined(nodes: list[ast.AST]) -> Iterator[str]:
    """The private names that a module gives to something of its own."""
    for node in nodes:
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
    if isinstance(owner, ast.Call):
        return isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def reached(nodes: list[ast.AST], foreign: set[str], own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of another module: imported, read of an object, written
    in text for ``setattr`` and the like, or inherited."""
    for node in nodes:
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


@pytest.mark.slow
def test_no_test_reaches_a_private_name_of_another_module() -> None:
    product = {name for path in modules(*PRODUCT, "tools") for name in defined(syntax(path))}
    tests = {path: syntax(path) for path in modules("tests")}
    own = {name for nodes in tests.values() for name in defined(nodes)}
    found = [
        f"{place(path)}:{line}: {name}"
        for path, nodes in tests.items()
        for line, name in reached(nodes, product, own)
    ]
    assert not found, "use what is public, or make it public:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from orchestrator.driver.run import _hidden",
        "case.driver._hidden = 1",
        'monkeypatch.setattr("orchestrator.driver.run._hidden", 1)',
        'patch.object(Driver, "_hidden")',
        "class Mine(Driver):\n    def act(self): return self._hidden",
        "class Mine(Driver):\n    def act(self): return super()._hidden()",
    ],
)
def test_every_way_to_reach_a_private_name_is_seen(source: str) -> None:
    private = {"_hidden"}
    assert [name for _, name in reached(nodes_of(source), private, set())] == ["_hidden"]
    assert not list(reached(nodes_of(source.replace("_hidden", "shown")), private, set()))
    mine = nodes_of("class Mine:\n    _hidden = 1\n    def act(self): return self._hidden")
    assert not list(reached(mine, private, set(defined(mine))))
