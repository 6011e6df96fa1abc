"""The tables of docs/rehearsal.md: made from the plan and from ``rehearsal.json``, never typed.

python tests/chaos/chaos_tables.py rehearsal/rehearsal.json     # write them into docs/rehearsal.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos_plan import KINDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rehearsal.md"


def kinds_table() -> str:
    lines = ["| fault | how |", "|---|---|"]
    lines += [f"| {name} | {kind.how} |" for name, kind in KINDS.items()]
    return "\n".join(lines) + "\n"


def markdown(figures: Mapping[str, Any]) -> str:
    states = ", ".join(f"{count} {state}" for state, count in sorted(figures["states"].items()))
    lines = [
        "| figure | value |",
        "|---|---|",
        f"| jobs, attempts, attempts lost | {figures['jobs']}, {figures['attempts']}, "
        f"{figures['attempts_lost']} |",
        f"| ended as | {states} |",
        f"| time | {figures['wall_s'] / 60:.1f} min |",
        f"| faults, kinds | {figures['faults_total']}, {len(figures['faults'])}; one every "
        f"{figures['fault_every_s']:.0f} s |",
        f"| drivers started, that ended by themselves | {figures['drivers']}, "
        f"{figures['drivers_that_died']} |",
        f"| rows lost, duplicated | {figures['rows_lost']}, {figures['rows_duplicated']} |",
        f"| row files that rotted, set aside and named | {figures['files_rotted']}, "
        f"{figures['files_set_aside']} |",
        f"| processes, ports or cards left behind | {figures['left_behind']} |",
        f"| what did not hold | {len(figures['problems'])} |",
        f"| memory at most, all processes | {figures['peak_memory_mib'] / 1024:.1f} GiB |",
        "",
        "| fault | injected | until the next attempt started there, median | longest |",
        "|---|---|---|---|",
    ]
    for kind, count in figures["faults"].items():
        times = figures["recovery_s"].get(kind)
        told = f"{times['median']:.1f} s | {times['max']:.0f} s" if times else "| "
        lines.append(f"| {kind} | {count} | {told} |")
    return "\n".join(lines) + "\n"


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """A page with these tables between its comments ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    for name, table in tables.items():
        pattern = rf"(<!-- {name}\b[^>]*-->\n).*?(<!-- /{name} -->)"
        page, found = re.subn(pattern, lambda m, t=table: f"{m[1]}{t}{m[2]}", page, flags=re.S)
        if found != 1:
            raise ValueError(f"the page has {found} places for the table {name!r}")
    return page


def main(arguments: list[str]) -> int:
    tables = {"kinds": kinds_table()}
    if arguments:
        tables["rehearsal"] = markdown(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    page = with_tables(PAGE.read_text(encoding="utf-8"), tables)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
