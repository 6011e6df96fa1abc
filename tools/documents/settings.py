"""``docs/settings.md``: the settings of jobs, workloads and engines, from their declarations.

``python -m tools.documents.settings > docs/settings.md`` writes it; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from orchestrator.core.settings import FIELDS
from workloads.engines import ENGINES, engines_for
from workloads.registry import WORKLOADS
from workloads.settings import Declaration, declarations

_HEAD = """\
# Settings

Every setting that a job may have beside the keys of [grid files](grids.md), made from the
declarations (`python -m tools.documents.settings > docs/settings.md`). The role says whether rows
that differ in it are compared ([roles](grids.md#roles-of-settings)).
"""


def document() -> str:
    """The page, with a section for each workload."""
    parts = [_HEAD]
    for heading, summary, declared in _sections():
        parts.append(f"\n## {heading}\n\n{summary}\n\n{_table(declared)}")
    return "".join(parts)


def _sections() -> Iterator[tuple[str, str, Mapping[str, Declaration]]]:
    yield "Fields that every job has", "What is measured, and on how many cards.", FIELDS
    for workload, entry in WORKLOADS.items():
        yield workload, entry.summary, declarations(entry.parameters)
    yield "Engines", "An engine that lacks a setting makes the job UNSUPPORTED.", _of_engines()


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
    print(document(), end="")
