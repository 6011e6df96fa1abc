"""Overrides of a grid from the command line: ``--set axes.batch_size=1..8``.

The file's text is edited in place, so the run stores the grid that it measured, and a fault in a
value is reported with its position.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import yaml

from orchestrator.core.errors import GridError, Problem
from orchestrator.grid.yaml import Document, parse

#: Keys of an experiment under which settings stand.
GROUPS = ("axes", "measure")
_BARE = re.compile(r"[\w./~+-][\w./~+*@-]*(?: [\w./~+*@-]+)*\Z")


def overridden(document: Document, texts: Sequence[str]) -> Document:
    """Set each ``PATH=VALUE`` in order: ``KEY``, ``axes.KEY`` or ``measure.KEY`` of every
    experiment, or with ``NAME.`` in front of the one of that name.

    Raises GridError for an unknown path, an invalid value, or an impossible edit.
    """
    for text in texts:
        for index, keys, value in _meant(document, text):
            content = _edited(document, ("experiments", index, *keys), value, text)
            document = parse(content.encode(), document.file)
    options = " ".join(f"--set {text}" for text in texts)
    return replace(document, file=f"{document.file} (with {options})") if texts else document


def _meant(document: Document, text: str) -> Iterable[tuple[int, tuple[str, ...], str]]:
    """Index of each experiment that is meant, the keys within it, and the value as YAML."""
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    experiments = document.data.get("experiments")
    named = {
        str(entry.get("name")): index
        for index, entry in enumerate(experiments if isinstance(experiments, list) else ())
        if isinstance(entry, dict)
    }
    chosen = list(named.values())
    for name in sorted(named, key=len, reverse=True):  # a name may have dots
        if path.startswith(f"{name}.") and keys[0] not in GROUPS:
            chosen, keys = [named[name]], tuple(path.strip().removeprefix(f"{name}.").split("."))
            break
    grouped = len(keys) == 2 and keys[0] in GROUPS
    if not equals or not all(keys) or not (grouped or (len(keys) == 1 and keys[0] not in GROUPS)):
        names = ", ".join(named) or "none"
        raise _refused(
            document,
            text,
            "leads to nothing in a grid" if equals else "has no value",
            "write KEY=VALUE, axes.KEY=VALUE, measure.KEY=VALUE, or NAME. before it for one "
            f"experiment; here: {names}",
        )
    written = _as_yaml(value.strip(), document, text)
    return [(index, keys, written) for index in chosen]


def _as_yaml(value: str, document: Document, text: str) -> str:
    """A value as it may stand anywhere in a file: a list in brackets, or a scalar."""
    if value.startswith("["):
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = None
        if isinstance(parsed, list) and "\n" not in value:
            return value
        raise _refused(document, text, "is no list", "write axes.precision=[bf16, fp32]")
    return value if _BARE.match(value) else json.dumps(value, ensure_ascii=False)


def _edited(document: Document, path: tuple[str | int, ...], value: str, text: str) -> str:
    content = document.text
    here: Any = yaml.compose(content, Loader=yaml.SafeLoader)
    for depth, step in enumerate(path):
        if isinstance(step, int):
            here = here.value[step]
            continue
        within = path[depth + 1 :]
        entry = next((entry for entry in here.value if entry[0].value == step), None)
        if entry is None:
            return _inserted(content, here, f"{step}: {_nested(within, value)}")
        key, here = entry
        if here.start_mark.index < key.end_mark.index:
            hint = "change the file: the value is shared with another place"
            raise _refused(document, text, "stands there by an alias", hint)
        if within and not isinstance(here, yaml.CollectionNode):
            return _replaced(content, key, here, _nested(within, value))
    return _replaced(content, key, here, value)


def _nested(keys: Sequence[str | int], value: str) -> str:
    for key in reversed(keys):
        value = f"{{{key}: {value}}}"
    return value


def _replaced(content: str, key: Any, node: Any, value: str) -> str:
    """The text with another value behind a key, and a remark on the key's line still there."""
    colon = content.index(":", key.end_mark.index) + 1
    between = content[colon : max(colon, node.start_mark.index)].rstrip()
    return f"{content[:colon]} {value}{between}{content[_end(node, content) :]}"


def _inserted(content: str, mapping: Any, line: str) -> str:
    """The text with one more entry in a mapping, behind its first."""
    if mapping.flow_style:
        at = mapping.start_mark.index + 1
        return f"{content[:at]}{line}{', ' if mapping.value else ''}{content[at:]}"
    key, first = mapping.value[0]
    at = content.find("\n", _end(first, content))
    indent = " " * key.start_mark.column
    if at < 0:
        return f"{content}\n{indent}{line}\n"
    return f"{content[:at]}\n{indent}{line}{content[at:]}"


def _end(node: Any, content: str) -> int:
    """Index behind the last character of a value; what PyYAML says of a block is later."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last, content)
    start, end = int(node.start_mark.index), int(node.end_mark.index)
    return max(start, len(content[:end].rstrip()))


def _refused(document: Document, text: str, message: str, hint: str) -> GridError:
    path = f"--set {text}"
    return GridError([Problem(file=document.file, path=path, message=message, hint=hint)])
