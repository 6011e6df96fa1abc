"""Estimate from their imports which test files may execute a module, where no recording says so.

That is coarse, and quick to find: a test file counts when a chain of imports leads from it to the
module, or when it lies in the folder that mirrors the module's. An import by name counts by its
text; a package that looks into its own folder for what is declared there imports all of it.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


def mirrored(test: str, module: str) -> bool:
    """Return whether a test file lies in the folder that mirrors the module's, or is named as that
    folder is."""
    package, _, rest = module.rpartition("/")[0].partition("/")
    folders = {f"tests/{rest}".rstrip("/"), f"tests/{package}/{rest}".rstrip("/")}
    above = {folder.rpartition("/") for folder in folders}
    files = tuple(f"{parent}/test_{name}" for parent, _, name in above)
    return test.rpartition("/")[0] in folders or test.startswith(files)


class Imports:
    """The imports of a tree: of its packages, and of its tests."""

    def __init__(self, root: Path, packages: tuple[str, ...]) -> None:
        paths = (path for top in (*packages, "tests") for path in (root / top).rglob("*.py"))
        files = {str(path.relative_to(root)): path for path in paths}
        # Tests import each other, and their helpers, by the bare name.
        self._files = {_dotted(name): name for name in files}
        self._files |= {Path(n).stem: n for n in files if n.startswith("tests/")}
        self._sources = {name: path.read_text() for name, path in files.items()}
        self._test_files = [n for n in files if Path(n).name.startswith("test_")]

    @cache  # noqa: B019 - one tree a process
    def executing(self, module: str) -> dict[str, int]:
        """The test files that may execute a module, with the number of imports that lead to it."""
        distances = {file: self._reached(file).get(module) for file in self._test_files}
        return {
            file: 0 if distance is None else distance
            for file, distance in distances.items()
            if distance is not None or mirrored(file, module)
        }

    @cache  # noqa: B019
    def _reached(self, file: str) -> dict[str, int]:
        found, todo, distance = {file: 0}, {file}, 0
        while todo:
            distance += 1
            todo = {name for each in todo for name in self._imported(each)} - found.keys()
            found |= dict.fromkeys(todo, distance)
        return found

    @cache  # noqa: B019
    def _imported(self, file: str) -> frozenset[str]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(self._sources[file])):
            if isinstance(node, ast.Import):
                names.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{each.name}" for each in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value.partition(":")[0])
                if node.value.endswith("."):  # "package." + name
                    names.update(n for n in self._files if n.startswith(node.value))
        if "Declared(__name__" in self._sources[file]:
            names.update(n for n in self._files if n.startswith(f"{_dotted(file)}."))
        return frozenset(self._files[name] for name in names if name in self._files)


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
