"""Plain English in code: docstrings name their subject first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from source_tree import ROOT, modules, syntax

QUESTION_WORDS = ["What", "Which", "Whether", "Who", "Whom", "Whose", "How", "Why", "Where", "When"]
#: Packages whose docstrings all open with a verb or a noun phrase.
PLAIN = ("orchestrator", "workloads", "benchmarks", "tests", "tools")
_QUESTION = re.compile(rf"\s*({'|'.join(QUESTION_WORDS)})\b")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of the module, its classes, functions and fields."""
    for node in syntax(source):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if getattr(node, "name", "").startswith("test_"):
            continue  # its docstring is a sentence, of one behaviour
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def questions(source: str) -> list[str]:
    """The docstrings that open with a question word, as ``line: text``."""
    return [
        f"{line}: {text.strip().splitlines()[0]}"
        for line, text in docstrings(source)
        if _QUESTION.match(text)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("package", PLAIN)
def test_no_docstring_opens_with_a_question_word(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{question}"
        for path in modules(package)
        for question in questions(path.read_text(encoding="utf-8"))
    ]
    assert not found, "open with a verb or a noun phrase instead:\n" + "\n".join(found)


@pytest.mark.parametrize("word", QUESTION_WORDS)
def test_a_question_word_is_found_wherever_a_docstring_may_stand(word: str) -> None:
    source = "\n".join(
        [
            f'"""{word} module."""',
            "class A:",
            f'    """{word} class."""',
            "    x = 1",
            f'    """{word} field."""',
            "    def f(self):",
            f'        """\n        {word} method."""',
            "async def g():",
            f'    """{word} coroutine."""',
            "def h():",
            f'    """Say {word}; {word}ever is no question word."""',
            "def i():",
            f'    """{word}ever is no question word."""',
        ]
    )
    kinds = sorted(question.split()[2] for question in questions(source))
    assert kinds == ["class.", "coroutine.", "field.", "method.", "module."]
