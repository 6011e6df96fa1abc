"""Print what became of every public class and function of an earlier commit, as CSV.

    python -m tools.documents.names b6bcd297 > names.csv

``kept`` is in the same file, ``moved`` in another one; of what is ``gone`` (removed, merged or
renamed) the commit says why that took it away.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import subprocess
import sys
from collections import defaultdict

PACKAGES = ("orchestrator", "workloads")
_DEFINITION = re.compile(r"^([-+])(?:async )?(?:def|class) ([A-Za-z]\w*)")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], check=True, capture_output=True)
    return done.stdout.decode(errors="replace")


def public_names(commit: str) -> dict[str, list[tuple[str, str]]]:
    """Public classes and functions of a commit: name -> (file, kind)."""
    names: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in _git("ls-tree", "-r", "--name-only", commit, *PACKAGES).splitlines():
        if file.endswith(".py"):
            for node in ast.parse(_git("show", f"{commit}:{file}")).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_":
                    kind = "class" if isinstance(node, ast.ClassDef) else "function"
                    names[node.name].append((file, kind))
    return names


def removals(before: str, after: str) -> dict[str, str]:
    """The last commit between two that took each name away: name -> hash and subject."""
    removed: dict[str, str] = {}
    form = "--format=@@@%h %s"
    log = _git("log", "-p", "-U0", "--no-renames", "--reverse", form, f"{before}..{after}", "--")
    for commit in log.split("\n@@@"):
        subject, *lines = commit.removeprefix("@@@").splitlines()
        names: dict[str, set[str]] = {"-": set(), "+": set()}
        for line in lines:
            if found := _DEFINITION.match(line):
                names[found[1]].add(found[2])
        removed |= dict.fromkeys(names["-"] - names["+"], subject)
    return removed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="HEAD")
    args = parser.parse_args()
    old, new = public_names(args.before), public_names(args.after)
    removed = removals(args.before, args.after)
    table = csv.writer(sys.stdout)
    table.writerow(("name", "kind", "file", "fate", "now"))
    for name in sorted(old):
        files = [file for file, _ in new.get(name, ())]
        for file, kind in old[name]:
            if file in files:
                fate, now = "kept", file
            elif files:
                fate, now = "moved", files[0]
            else:
                fate, now = "gone", removed.get(name, "")
            table.writerow((name, kind, file, fate, now))


if __name__ == "__main__":
    main()
