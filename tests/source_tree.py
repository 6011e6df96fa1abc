"""The project's own source files, each parsed once in a process, and what each of them imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("orchestrator", "workloads")


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@cache
def syntax(path: Path) -> list[ast.AST]:
    return nodes_of(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names of all modules that a file imports, type-checking blocks left out."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(syntax(path)[0])
    return frozenset(names)


def modules(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))
