"""Grid files as text: strict YAML in, plain values with positions out.

YAML surprises people, and a surprise in a grid is a wasted night. So scalars follow the YAML 1.2
core schema, narrowed: `no` and `on` are text, `010`, `1_000` and `1:30` are text and not numbers,
`1e3` is a number, numbers are decimal and finite. Refused, each with line and column: duplicate
keys, tags, merge keys (`defaults:` does that work), several documents, aliases that expand without
bound, bytes that are not UTF-8, tabs in indentation, control characters. Anchors and aliases work.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import GridError, Problem
from orchestrator.grid import shipped
from orchestrator.grid.nodes import Node, compose, problem_at, unprintable
from workloads import files

MAX_FILE_BYTES = 4 * 2**20
MAX_PROBLEMS_OF_TEXT = 20  # a file of the wrong kind has one on every line

#: Place of a value in the file, e.g. ``("experiments", 0, "axes", "precision", 2)``.
Path_ = tuple[str | int, ...]

_INDENT_TAB = re.compile(r"^ *\t", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed grid file: its text, its values, and where each of them stands."""

    file: str
    text: str
    root: Node
    data: dict[str, Any]

    def position(self, path: Path_, *, key: bool = False) -> tuple[int, int]:
        """Line and column of the value at ``path`` (or of its key), from 1.

        A path that leads nowhere gives the position of the deepest value on the way.
        """
        here = self.root
        for number, step in enumerate(path, 1):
            if here.entries is not None and step in here.entries:
                key_position, here = here.entries[str(step)]
                if key and number == len(path):
                    return key_position.line, key_position.column
            elif here.items is not None and isinstance(step, int) and step < len(here.items):
                here = here.items[step]
            else:
                break
        return here.line, here.column

    def problem(self, path: Path_, message: str, hint: str = "", *, key: bool = False) -> Problem:
        """A Problem with the position of ``path``."""
        line, column = self.position(path, key=key)
        return Problem(
            file=self.file,
            line=line,
            column=column,
            path=path_text(path),
            message=message,
            hint=hint,
            steps=path,
        )


def path_text(path: Path_) -> str:
    """``("experiments", 0, "axes")`` as ``experiments[0].axes``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def read(path: Path | str) -> Document:
    """Read a grid file.

    Raises:
        GridError: all that is wrong with it as a YAML file, in file order.
    """
    try:
        content = files.read_bytes(path, limit_bytes=MAX_FILE_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise GridError([_too_large(str(path))]) from error
        reason = error.strerror or type(error).__name__
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
        hint = f"grids that come with Nightgrid: {', '.join(shipped.names())}" if missing else ""
        raise GridError([problem_at(str(path), f"cannot be read: {reason}", hint)]) from error
    return parse(content, str(path))


def parse(content: bytes, file: str) -> Document:
    """Parse the bytes of a grid file; ``file`` is its name in messages.

    Raises:
        GridError: all that is wrong with it as a YAML file, in file order.
    """
    if len(content) > MAX_FILE_BYTES:
        raise GridError([_too_large(file)])
    text, problems = _decode(content, file)
    problems += _text_problems(text, file)
    if any(problem.column != 1 or problem.line != 1 for problem in problems) or not text:
        raise GridError(problems or [_empty(file)])
    root, composing = compose(text, file)
    problems += composing
    if root is None:
        problems = problems or [_empty(file)]
    elif root.entries is None and not problems:
        problems = [problem_at(file, "a grid is a mapping of keys to values", _EXAMPLE, root)]
    if problems or root is None:
        raise GridError(problems)
    data = root.plain()
    assert isinstance(data, dict)
    return Document(file=file, text=text, root=root, data=data)


def _too_large(file: str) -> Problem:
    limit = f"{MAX_FILE_BYTES // 2**20} MiB"
    hint = "axes and ranges say in a line what a million points would"
    return problem_at(file, f"is larger than {limit}, the limit for a grid", hint)


_EXAMPLE = "begin with `name: my-grid`, then `experiments:` (docs/grids.md has an example)"


def _empty(file: str) -> Problem:
    return problem_at(file, "the file is empty", _EXAMPLE, Node(1, 1))


def _decode(content: bytes, file: str) -> tuple[str, list[Problem]]:
    """The text, and what is wrong with its encoding. Undecodable content gives no text."""
    start = Node(1, 1)
    hint = "save the file as UTF-8"
    for mark in (b"\xff\xfe", b"\xfe\xff"):
        if content.startswith(mark):
            return "", [problem_at(file, "the file is UTF-16, not UTF-8", hint, start)]
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line = before.count(b"\n") + 1
        column = len(before.rpartition(b"\n")[2].decode("utf-8", "replace")) + 1
        message = f"byte 0x{content[error.start]:02x} is not UTF-8"
        return "", [problem_at(file, message, hint, Node(line, column))]
    if text.startswith("\ufeff"):
        message = "the file begins with a byte order mark"
        return text[1:], [problem_at(file, message, "save the file as UTF-8 without BOM", start)]
    return text, []


def _text_problems(text: str, file: str) -> list[Problem]:
    """Tabs in indentation and characters that have no place in a text file."""
    found: list[tuple[int, str, str]] = []
    for match in _INDENT_TAB.finditer(text):
        found.append((match.end() - 1, "a tab in the indentation", "indent with spaces"))
    for match in unprintable(text):
        code = f"U+{ord(match[0]):04X}"
        found.append((match.start(), f"the control character {code}", "remove it"))
    found.sort()
    problems = []
    for offset, message, hint in found[:MAX_PROBLEMS_OF_TEXT]:
        line = text.count("\n", 0, offset) + 1
        column = offset - text.rfind("\n", 0, offset)
        problems.append(problem_at(file, message, hint, Node(line, column)))
    if len(found) > MAX_PROBLEMS_OF_TEXT:
        more = len(found) - MAX_PROBLEMS_OF_TEXT
        problems.append(problem_at(file, f"and {more} more such characters: is this a text file?"))
    return problems
