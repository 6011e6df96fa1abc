"""Plant defects in the product and report which suite catches them.

    PYTHONPATH=tools python -m defects record --suite quick     which tests execute which lines
    PYTHONPATH=tools python -m defects plant --suite quick      plant, look, write results
    PYTHONPATH=tools python -m defects report                   the survivors

Each goes on where it was interrupted. Of test files that are not recorded, their imports say which
modules they may execute: `plant` alone works, and takes longer where a defect survives. The commit
named by --revision is copied into --output; the tests can be those of another commit (--tests),
which shows what a changed suite catches. coverage.py must be installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import yaml

from defects.executed import Project, Record, record
from defects.mutations import chosen
from defects.planting import Result, plant, results

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("orchestrator", "workloads")
LIBRARIES = (
    "pytest",
    "hypothesis",
    "xdist",
    "pyarrow.parquet",
    "pydantic",
    "rich.console",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.generation",
    "peft",
)
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")


def quick_expression(makefile: str) -> str:
    """The marks that ``make quick`` selects by."""
    found = re.search(r"^quick:.*\n\t.*-m \"([^\"]+)\"", makefile, re.MULTILINE)
    if found is None:
        raise ValueError('the Makefile has no target `quick` with -m "..."')
    return found[1]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def copy_of(root: Path, revision: str, tests: str | None, to: Path) -> Path:
    """A clone of the tree at a commit, made once, with the tests of another commit if named."""
    commit = _git("-C", str(root), "rev-parse", revision)[:12]
    of_tests = _git("-C", str(root), "rev-parse", tests)[:12] if tests else commit
    place = to / f"{commit}-{of_tests}"
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        _git("clone", "--quiet", "--shared", "--no-checkout", str(root), str(place / "tree"))
        _git("-C", str(place / "tree"), "checkout", "--quiet", "--detach", commit)
        if tests:
            shutil.rmtree(place / "tree" / "tests")
            _git("-C", str(place / "tree"), "checkout", of_tests, "--", "tests", "pyproject.toml")
        (place / "made").touch()
    _git("-C", str(place / "tree"), "checkout", "--", *PACKAGES)  # an interrupted run left one
    return place


def _equivalent() -> dict[str, str]:
    return {each["defect"]: each["reason"] for each in yaml.safe_load(EQUIVALENT.read_text()) or ()}


def summary(found: list[Result], equivalent: dict[str, str]) -> list[str]:
    """Lines that say what each suite caught, and which defects survived both."""
    lines = []
    keys = list(dict.fromkeys(each.key for each in found))
    for suite in dict.fromkeys(each.suite for each in found):
        counts = Counter(each.outcome for each in found if each.suite == suite)
        lines.append(f"{suite}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    caught = {each.key for each in found if each.outcome == "caught"}
    left = [key for key in keys if key not in caught]
    lines.append(f"{len(keys)} defects, {len(caught)} caught, {len(left)} survived:")
    for key in left:
        outcomes = {f"{each.suite}: {each.outcome}" for each in found if each.key == key}
        why = f"equivalent: {equivalent[key]}" if key in equivalent else "; ".join(sorted(outcomes))
        lines.append(f"  {key}\n      {why}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "plant", "report", "list"])
    parser.add_argument("--suite", choices=["quick", "whole"], default="whole")
    parser.add_argument("--count", type=int, default=60, help="how many defects")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--revision", default="HEAD", help="commit of the product")
    parser.add_argument("--tests", help="commit of the tests, if another one")
    parser.add_argument("--first", type=Path, help="results of another run: their tests go first")
    parser.add_argument(
        "--only",
        default="",
        help="of modules to plant in, or of test files to record: a part of their paths",
    )
    parser.add_argument(
        "--without", default="-", help="modules to plant nothing in: part of a path"
    )
    parser.add_argument(
        "--near",
        action="store_true",
        help="of tests that are not recorded: only those that import the module themselves, are "
        "named as it is, or lie in the folder that mirrors its own",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "defects")
    args = parser.parse_args()
    args.output = args.output.resolve()
    place = copy_of(ROOT, args.revision, args.tests, args.output)
    project = Project(
        root=place / "tree",
        packages=PACKAGES,
        quick=quick_expression((place / "tree" / "Makefile").read_text()),
        libraries=LIBRARIES,
    )
    of = re.sub(r"\W+", "-", f"seed-{args.seed}-{args.only}").strip("-")
    written = place / f"{of}.jsonl"
    if args.action == "record":
        files = [name for name in project.test_files() if args.only in name]
        record(project, files, place / "executed", only_quick=args.suite == "quick")
        return
    if args.action == "report":
        print("\n".join(summary(list(results(written).values()), _equivalent())))
        return
    modules = {
        path: text
        for path, text in project.modules().items()
        if args.only in path and args.without not in path
    }
    defects = chosen(modules, args.count, args.seed)
    if args.action == "list":
        print("\n".join(f"{each.kind:10} {each.key}" for each in defects))
        return
    executed = Record(place / "executed", project, near=args.near)
    first = {each.by for each in results(args.first).values()} if args.first else set()
    suites = ("quick",) if args.suite == "quick" else ("quick", "whole")
    plant(
        project,
        defects,
        executed,
        written,
        suites=suites,
        first=frozenset(first),
    )


if __name__ == "__main__":
    main()
