"""The project's own source files, and what each of them imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def syntax(source: str) -> list[ast.AST]:
    """All nodes of a module's syntax tree, itself first."""
    return list(ast.walk(ast.parse(source)))


@cache
def imported(path: Path, *, top_level_only: bool = False) -> frozenset[str]:
    """Dotted names of all modules that a file imports, type-checking blocks left out."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(syntax(path.read_text(encoding="utf-8"))[0])
    return frozenset(names)


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))
