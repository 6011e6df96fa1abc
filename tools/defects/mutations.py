"""One-line mutations of Python source, found in its syntax tree; pure.

A mutation replaces the text of one expression or statement that stands on one line, so that all
else, comments and line numbers included, stays as it is. Text in quotes is left alone: most of it
is for people, and a test that compares every word of a message holds nothing else.
"""

from __future__ import annotations

import ast
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
_EXTREMES = {"min": "max", "max": "min"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One changed line. ``nth`` tells equal lines of one function apart; ``at_import`` says that
    the line runs when its module is imported."""

    path: str
    scope: str
    at_import: bool
    kind: str
    line: int
    before: str
    after: str
    nth: int

    @property
    def key(self) -> str:
        """Name the mutation so that it keeps its name when lines above it come and go."""
        again = f" (no. {self.nth + 1})" if self.nth else ""
        return f"{self.path}::{self.scope}: {self.before.strip()} -> {self.after.strip()}{again}"

    def applied(self, source: str) -> str:
        """The source with the changed line."""
        lines = source.splitlines(keepends=True)
        if lines[self.line - 1].rstrip("\r\n") != self.before:
            raise ValueError(f"{self.path}:{self.line} is not {self.before!r} any more")
        lines[self.line - 1] = lines[self.line - 1].replace(self.before, self.after)
        return "".join(lines)


def mutations(source: str, path: str) -> list[Mutation]:
    """The mutations of a module, one of them or another without effect: see ``is_defect``."""
    lines = source.splitlines()
    seen: dict[tuple[str, str, str], int] = defaultdict(int)
    found = []
    tree = ast.parse(source)
    in_functions = lines_of_functions(tree)
    for scope, kind, node, text in _candidates(tree, ()):
        if node.lineno != node.end_lineno:
            continue
        before = lines[node.lineno - 1]
        raw = before.encode()
        after = (raw[: node.col_offset] + text.encode() + raw[node.end_col_offset :]).decode()
        at = (".".join(scope) or "<module>", before, after)
        found.append(
            Mutation(
                path=path,
                scope=at[0],
                at_import=node.lineno not in in_functions,
                kind=kind,
                line=node.lineno,
                before=before,
                after=after,
                nth=seen[at],
            )
        )
        seen[at] += 1
    return found


def is_defect(mutation: Mutation, source: str) -> bool:
    """Tell whether the changed module compiles to another program."""
    try:
        return ast.dump(ast.parse(mutation.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def lines_of_functions(tree: ast.Module) -> set[int]:
    """The lines that run when a function is called, and not when its module is imported."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, functions))
    return {
        line
        for body in bodies
        for statement in body
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }


_Candidate = tuple[tuple[str, ...], str, ast.expr | ast.stmt, str]


def _candidates(node: ast.AST, scope: tuple[str, ...]) -> Iterator[_Candidate]:
    if isinstance(node, ast.JoinedStr) or _for_type_checkers(node):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = (*scope, node.name)
    for kind, target, text in _of(node, scope):
        yield scope, kind, target, text
    for name, child in _children(node):
        if name not in ("annotation", "returns", "decorator_list", "bases"):
            yield from _candidates(child, scope)


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _of(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """The mutations of one node, without those of its children."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[at] = _COMPARISONS[type(operator)]()
            yield "comparison", node, _bracketed(other)
    elif isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "boolean", node, _bracketed(other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "boolean", node, _bracketed(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not any(_is_text(side) for side in (node.left, node.right)):
            other = copy.deepcopy(node)
            other.op = _ARITHMETIC[type(node.op)]()
            yield "arithmetic", node, _bracketed(other)
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in _EXTREMES:
            yield "limit", node.func, _EXTREMES[node.func.id]
    elif isinstance(node, ast.Return) and node.value is not None:
        if not isinstance(node.value, ast.Constant):
            yield "return", node, "return None"
    elif isinstance(node, ast.stmt):
        yield from _statements(node, scope)
    for test in _tests(node):
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield "condition", test, f"(not {_bracketed(test)})"


def _tests(node: ast.AST) -> Sequence[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.expr, str]]:
    if isinstance(node.value, bool):
        yield "constant", node, repr(not node.value)
    elif isinstance(node.value, int):
        yield "constant", node, repr(node.value + 1)
        if node.value > 1:
            yield "limit", node, repr(node.value * 10)
    elif isinstance(node.value, float):
        yield "constant", node, repr(node.value * 2 or 1.0)
        yield "limit", node, repr(node.value * 10 or 10.0)


def _statements(node: ast.stmt, scope: tuple[str, ...]) -> Iterator[tuple[str, ast.stmt, str]]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    is_jump = isinstance(node, ast.Raise | ast.Continue | ast.Break | ast.Delete)
    is_state = isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    )
    if scope and (is_call or is_jump or is_state or isinstance(node, ast.AugAssign)):
        yield "removed", node, "pass"
    if (
        isinstance(node, ast.AugAssign)
        and type(node.op) in _ARITHMETIC
        and not _is_text(node.value)
    ):
        other = copy.deepcopy(node)
        other.op = _ARITHMETIC[type(node.op)]()
        yield "arithmetic", node, ast.unparse(other)


def _is_text(node: ast.expr) -> bool:
    """Arithmetic on text and lists fails at once, whatever it is for."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def _bracketed(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def chosen(modules: dict[str, str], count: int, seed: int) -> list[Mutation]:
    """Draw mutations from modules (source by path): the folders take turns, and within a folder
    the kinds of mutation, so that a large folder and a frequent kind crowd out no other. A line is
    changed once."""
    draw = random.Random(seed)
    folders: dict[str, dict[str, list[Mutation]]] = {}
    for path, source in sorted(modules.items()):
        for mutation in mutations(source, path):
            kinds = folders.setdefault(path.rpartition("/")[0], {})
            kinds.setdefault(mutation.kind, []).append(mutation)
    result: list[Mutation] = []
    lines: set[tuple[str, int]] = set()
    while folders and len(result) < count:
        for folder in draw.sample(sorted(folders), len(folders)):
            while len(result) < count and (drawn := _drawn(folders[folder], draw)):
                at = (drawn.path, drawn.line)
                if at not in lines and is_defect(drawn, modules[drawn.path]):
                    lines.add(at)
                    result.append(drawn)
                    break
            if not folders[folder]:
                del folders[folder]
    return result


def _drawn(kinds: dict[str, list[Mutation]], draw: random.Random) -> Mutation | None:
    """Take one mutation out of those of a folder; None when there is none left."""
    if not kinds:
        return None
    kind = draw.choice(sorted(kinds))
    taken = kinds[kind].pop(draw.randrange(len(kinds[kind])))
    if not kinds[kind]:
        del kinds[kind]
    return taken
