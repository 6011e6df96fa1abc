"""Grid files as text: strict YAML in, plain values with positions out.

Scalars follow a narrowed YAML 1.2 core schema: `no`, `on`, `010`, `1_000` and `1:30` are text,
`1e3` is a number. Refused, each with line and column: duplicate keys, tags, merge keys, several
documents, aliases that expand without bound, bytes that are not UTF-8, tabs in indentation, control
characters. PyYAML's composer is recursive (deep nesting overflows the stack) and loses positions of
aliases, so the parser's events are composed here.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.core.errors import GridError, Problem
from orchestrator.core.job import Scalar
from orchestrator.grid import shipped_names
from workloads.util import files

MAX_DEPTH = 24  # a grid needs six
MAX_ALIASED_VALUES = 20_000  # values that aliases may add to those written out

Plain = Scalar | list[Any] | dict[str, Any]

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z"
    r"|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)
_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_MAX_DIGITS = 18

#: Characters that YAML forbids, and three line breaks of YAML 1.1 that editors do not count.
_UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


@dataclass(slots=True)
class Node:
    """A value and where it begins. ``entries`` of a mapping keep where each key begins too."""

    line: int
    column: int
    scalar: Scalar = None
    items: list[Node] | None = None
    entries: dict[str, tuple[Node, Node]] | None = None  # key -> (the key's position, value)
    size: int = 1  # how many values it is when aliases are written out; 0 while it is read

    def plain(self) -> Plain:
        """The value as lists, dictionaries and scalars."""
        if self.items is not None:
            return [item.plain() for item in self.items]
        if self.entries is not None:
            return {key: value.plain() for key, (_, value) in self.entries.items()}
        return self.scalar


def resolve(text: str) -> Scalar:
    """Interpret an unquoted scalar; raises ValueError for infinite or too long numbers."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.match(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"a whole number of {len(text.lstrip('+-'))} digits")
        return int(text)
    if _FLOAT.match(text):
        number = math.inf if text[-1] in "fFnN" else float(text) + 0.0  # .inf, .nan; -0.0 is 0.0
        if not math.isfinite(number):
            raise ValueError(f"{text} is not a finite number")
        return number
    return text


def problem_at(file: str, message: str, hint: str = "", at: Node | None = None) -> Problem:
    """A Problem at a node's position; without one it is about the file as a whole."""
    line, column = (at.line, at.column) if at else (None, None)
    return Problem(file=file, line=line, column=column, message=message, hint=hint)


def compose(text: str, file: str) -> tuple[Node | None, list[Problem]]:
    """The root node of the only document in ``text``, None where there is none to speak of, and all
    that is wrong with it as YAML."""
    composer = _Composer(text, file)
    root: Node | None = None
    try:
        for event in composer.events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                message = "a second document begins here"
                hint = "a file holds one grid; several experiments go under `experiments:`"
                raise composer.stopped(message, hint, event)
            if isinstance(event, yaml.NodeEvent):
                root = composer.node(event)
    except _Stop:
        root = None
    return root, composer.problems


class _Stop(Exception):
    """Composing cannot go on; the reason is in ``problems``."""


class _Composer:
    """Parser events -> nodes, no deeper than ``MAX_DEPTH``, collecting problems on the way."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.events = self._events(text)
        self.problems: list[Problem] = []
        self.anchors: dict[str, Node] = {}
        self.aliased = 0

    def node(self, event: Any, depth: int = 0) -> Node:
        """The node that begins with an event; takes the events within it."""
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if event.tag is not None:
            hint = "remove it; quotes make a value text, e.g. '12'"
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._complain(f"the tag {tag}: grids have no tags", hint, event)
        node = _at(event)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        if isinstance(event, yaml.ScalarEvent):
            node.scalar = self._scalar(event)
            return node
        if depth >= MAX_DEPTH:
            raise self.stopped(f"nested more than {MAX_DEPTH} deep", "a grid needs six", event)
        node.size = 0  # until it is whole
        if isinstance(event, yaml.SequenceStartEvent):
            node.items = children = []
            for inner in self._until(yaml.SequenceEndEvent):
                children.append(self.node(inner, depth + 1))
        else:
            node.entries = {}
            for inner in self._until(yaml.MappingEndEvent):
                at = self.node(inner, depth + 1)
                key, value = self._key(at, inner), self.node(next(self.events), depth + 1)
                if key in node.entries:
                    first = node.entries[key][0].line
                    message = f"the key {key!r} is here twice; it is first on line {first}"
                    self.problems.append(problem_at(self.file, message, "keep one of them", at))
                else:
                    node.entries[key] = (at, value)
            children = [value for _, value in node.entries.values()]
        node.size = 1 + sum(child.size for child in children)
        return node

    def stopped(self, message: str, hint: str, event: Any) -> _Stop:
        """Note a problem that ends the reading."""
        self._complain(message, hint, event)
        return _Stop()

    def _until(self, end: type[yaml.Event]) -> Iterator[Any]:
        while not isinstance(event := next(self.events), end):
            yield event

    def _events(self, text: str) -> Iterator[Any]:
        try:
            yield from yaml.parse(text, Loader=LOADER)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = Node(mark.line + 1, mark.column + 1) if mark else None
            message = f"not valid YAML: {error.problem}"
            if error.context:
                start = error.context_mark
                began = f" begun on line {start.line + 1}" if start else ""
                message += f" ({error.context}{began})"
            self.problems.append(problem_at(self.file, message, _syntax_hint(message), at))
            raise _Stop from error
        except yaml.YAMLError as error:
            message = f"not valid YAML: {' '.join(str(error).split())}"
            self.problems.append(problem_at(self.file, message))
            raise _Stop from error

    def _complain(self, message: str, hint: str, event: Any) -> None:
        self.problems.append(problem_at(self.file, message, hint, _at(event)))

    def _scalar(self, event: Any) -> Scalar:
        if not event.implicit[0]:  # quoted or a block: text
            if odd := _UNPRINTABLE.search(event.value):
                code = f"U+{ord(odd[0]):04X}"
                self._complain(f"text with the control character {code}", "remove it", event)
            return str(event.value)
        try:
            return resolve(event.value)
        except ValueError as error:
            self._complain(str(error), "quote it if it is meant as text", event)
            return None

    def _alias(self, event: Any) -> Node:
        target = self.anchors.get(event.anchor)
        if target is None:
            hint = f"name a value with &{event.anchor} before; quote text that begins with *"
            self._complain(f"*{event.anchor} refers to nothing", hint, event)
            return _at(event)
        if not target.size:
            self._complain(f"*{event.anchor} contains itself", "write the value out", event)
            return _at(event)
        self.aliased += target.size
        if self.aliased > MAX_ALIASED_VALUES:
            message = f"aliases expand to more than {MAX_ALIASED_VALUES} values here"
            raise self.stopped(message, "write the values out, or use axes", event)
        return replace(target, line=event.start_mark.line + 1, column=event.start_mark.column + 1)

    def _key(self, node: Node, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            message, hint = "a key must be a plain word", "write `key: value`"
            self.problems.append(problem_at(self.file, message, hint, node))
            return f"\0{id(node)}"
        if event.value == "<<" and event.implicit[0]:
            hint = "put shared settings under `defaults:`"
            self.problems.append(problem_at(self.file, "merge keys are not used here", hint, node))
        return str(event.value)


def _at(event: Any) -> Node:
    return Node(event.start_mark.line + 1, event.start_mark.column + 1)


def _syntax_hint(message: str) -> str:
    if "mapping values are not allowed" in message:
        return "quote a value that contains `: `, or check the indentation of this line"
    if "'@'" in message or "'`'" in message or "'%'" in message:
        return "quote a value that begins with this character"
    if "tab" in message or r"'\t'" in message:
        return "use spaces instead of the tab"
    if "Unicode character escape" in message:  # half of a pair, as JSON writes emoji
        return "write the character itself, not as \\u escapes"
    return "check the quotes, brackets and indentation up to here"


MAX_FILE_BYTES = 4 * 2**20
MAX_PROBLEMS = 100  # others are counted
MAX_PROBLEMS_OF_TEXT = 20  # a file of the wrong kind has one on every line

#: Place of a value in the file, e.g. ``("experiments", 0, "axes", "precision", 2)``.
Path_ = tuple[str | int, ...]

_INDENT_TAB = re.compile(r"^ *\t", re.MULTILINE)
_INDENT = re.compile(r"^[ \t]+", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed grid file: its text, its values, and where each of them stands."""

    file: str
    text: str
    root: Node
    data: dict[str, Any]

    def position(self, path: Path_, *, key: bool = False) -> tuple[int, int]:
        """Line and column, from 1, of the value at ``path`` or its key; of the deepest existing
        value for an unknown path."""
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
        steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        return Problem(
            file=self.file,
            line=line,
            column=column,
            path="".join(steps).removeprefix("."),  # experiments[0].axes
            message=message,
            hint=hint,
            steps=path,
        )


def read(path: Path | str) -> Document:
    """Read a grid file; raises GridError with all YAML problems, in file order."""
    try:
        content = files.read_bytes(path, limit_bytes=MAX_FILE_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise GridError([_too_large(str(path))]) from error
        reason = error.strerror or type(error).__name__
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
        hint = f"grids that come with Nightgrid: {', '.join(shipped_names())}" if missing else ""
        raise GridError([problem_at(str(path), f"cannot be read: {reason}", hint)]) from error
    return parse(content, str(path))


def parse(content: bytes, file: str) -> Document:
    """Parse a grid file, named ``file`` in messages; raises GridError like ``read``."""
    if len(content) > MAX_FILE_BYTES:
        raise GridError([_too_large(file)])
    text, problems = _decode(content, file)
    if text.lstrip()[:1] == "{":  # JSON, where a tab is only space; columns stay
        text = _INDENT.sub(lambda indent: indent[0].replace("\t", " "), text)
    problems += _text_problems(text, file)
    if any(problem.column != 1 or problem.line != 1 for problem in problems) or not text:
        raise GridError(problems or [_empty(file)])
    root, composing = compose(text, file)
    problems += composing
    if root is None:
        problems = problems or [_empty(file)]
    elif root.entries is None and not problems:
        problems = [problem_at(file, "a grid is a mapping of keys to values", _EXAMPLE, root)]
    if (more := len(problems) - MAX_PROBLEMS) > 0:
        problems = [*problems[:MAX_PROBLEMS], problem_at(file, f"and {more:,} more problems")]
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
    tab = ("a tab in the indentation", "indent with spaces")
    faults = [(match.end() - 1, *tab) for match in _INDENT_TAB.finditer(text)]
    for match in _UNPRINTABLE.finditer(text):
        message = f"the control character U+{ord(match[0]):04X}"
        faults.append((match.start(), message, "remove it"))
    problems = []
    for offset, message, hint in sorted(faults)[:MAX_PROBLEMS_OF_TEXT]:
        line = text.count("\n", 0, offset) + 1
        column = offset - text.rfind("\n", 0, offset)
        problems.append(problem_at(file, message, hint, Node(line, column)))
    if len(faults) > MAX_PROBLEMS_OF_TEXT:
        more = len(faults) - MAX_PROBLEMS_OF_TEXT
        problems.append(problem_at(file, f"and {more} more such characters: is this a text file?"))
    return problems
