"""Overrides of a grid from the command line: ``--set axes.batch_size=1..8``.

The run stores the grid that it measured, as JSON. Problems are reported where the file has the
value, or would have it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from orchestrator.core.errors import GridError, Problem
from orchestrator.grid.yaml import Document, compose, resolve

#: Keys of an experiment under which settings stand.
GROUPS = ("axes", "measure")


def overridden(document: Document, texts: Sequence[str]) -> Document:
    """Set each ``PATH=VALUE`` in order: ``KEY``, ``axes.KEY`` or ``measure.KEY`` of every
    experiment, or with ``NAME.`` in front of the one of that name.

    Raises GridError for an unknown path or an invalid value.
    """
    if not texts:
        return document
    data = deepcopy(document.data)
    for text in texts:
        experiments, keys, value = _meant(document, data, text)
        for here in experiments:
            for group in keys[:-1]:
                if not isinstance(here.get(group), dict):
                    here[group] = {}
                here = here[group]
            here[keys[-1]] = deepcopy(value)
    options = " ".join(f"--set {text}" for text in texts)
    written = json.dumps(data, ensure_ascii=False, indent=2) + "\n"
    return replace(document, file=f"{document.file} (with {options})", text=written, data=data)


def _meant(
    document: Document, data: dict[str, Any], text: str
) -> tuple[list[dict[str, Any]], list[str], Any]:
    """The experiments that are meant, the keys within each, and the value."""
    path, equals, written = text.partition("=")
    keys = path.strip().split(".")
    experiments = data.get("experiments")
    listed = experiments if isinstance(experiments, list) else ()
    named = {str(entry.get("name")): entry for entry in listed if isinstance(entry, dict)}
    chosen = list(named.values())
    for name in sorted(named, key=len, reverse=True):  # a name may have dots
        if path.startswith(f"{name}.") and keys[0] not in GROUPS:
            chosen, keys = [named[name]], path.strip().removeprefix(f"{name}.").split(".")
            break
    grouped = len(keys) == 2 and keys[0] in GROUPS
    if not equals or not all(keys) or not (grouped or (len(keys) == 1 and keys[0] not in GROUPS)):
        raise _refused(
            document,
            text,
            "leads to nothing in a grid" if equals else "has no value",
            "write KEY=VALUE, axes.KEY=VALUE, measure.KEY=VALUE, or NAME. before it for one "
            f"experiment; here: {', '.join(named) or 'none'}",
        )
    written = written.strip()
    if written.startswith("["):
        node, problems = compose(written, document.file)
        if node is None or node.items is None or problems:
            raise _refused(document, text, "is no list", "write axes.precision=[bf16, fp32]")
        return chosen, keys, node.plain()
    try:
        value = resolve(written) if written else ""
    except ValueError as error:
        raise _refused(document, text, f"is no value: {error}", "") from None
    _, problems = compose(json.dumps(value, ensure_ascii=False), document.file)
    if problems:  # such as control characters, which the stored grid could not have
        raise _refused(document, text, f"is no value: {problems[0].message}", problems[0].hint)
    return chosen, keys, value


def _refused(document: Document, text: str, message: str, hint: str) -> GridError:
    path = f"--set {text}"
    return GridError([Problem(file=document.file, path=path, message=message, hint=hint)])
