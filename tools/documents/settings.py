"""The tables of settings in ``docs/grids.md``, from the declarations.

``python -m tools.documents.settings docs/grids.md`` renews them in place, one beneath
each heading "Settings: …"; a test compares. Everything else in the document is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.core.settings import FIELDS
from workloads.engines import ENGINES, engines_for
from workloads.registry import WORKLOADS
from workloads.settings import Declaration, declarations

_TABLE = re.compile(r"(?:^\|.*\n)+", flags=re.MULTILINE)


def renewed(document: str) -> str:
    """Rewrite every table of settings in the document.

    Raises:
        ValueError: a heading is missing, or has no table beneath it.
    """
    for heading, declared in _sections():
        start = document.index(f"\n## Settings: {heading}\n")
        end = document.find("\n## ", start + 1)
        table = _TABLE.search(document, start, end)
        if table is None:
            raise ValueError(f"no table beneath 'Settings: {heading}'")
        document = document[: table.start()] + _table(declared) + document[table.end() :]
    return document


def _sections() -> Iterator[tuple[str, Mapping[str, Declaration]]]:
    yield "fields that every job has", FIELDS
    for workload, entry in WORKLOADS.items():
        yield f"parameters of {workload}", declarations(entry.parameters)
    yield "of engines", _of_engines()


def _of_engines() -> dict[str, Declaration]:
    """The settings of all engines; each says whose it is."""
    found: dict[str, tuple[Declaration, dict[str, None]]] = {}
    for name in engines_for(None):
        for ability in ENGINES[name].abilities:
            model = ENGINES[name].settings(ability)
            for setting, one in declarations(model).items() if model else ():
                found.setdefault(setting, (one, {}))[1][name] = None
    return {
        setting: replace(one, description=f"{one.description} (Engines: {', '.join(names)}.)")
        for setting, (one, names) in found.items()
    }


def _table(declared: Mapping[str, Declaration]) -> str:
    lines = ["| setting | default | role | meaning |", "|---|---|---|---|"]
    for name, one in declared.items():
        meaning = one.description.replace("|", "\\|")
        lines.append(f"| `{name}` | {_default(one)} | {_role(one)} | {meaning} |")
    return "".join(f"{line}\n" for line in lines)


def _default(one: Declaration) -> str:
    if one.default is ...:
        return "none"
    bare = isinstance(one.default, str) and one.default
    return f"`{one.default}`" if bare else json.dumps(one.default)


def _role(one: Declaration) -> str:
    also = {
        "length": one.length,
        "loads": one.loads,
        f"saves: {one.produces}": one.produces,
        f"takes: {one.consumes}": one.consumes,
    }
    return ", ".join([one.role, *(word for word, applies in also.items() if applies)])


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
