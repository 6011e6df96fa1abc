"""``nightgrid compare RUN_A RUN_B``: what became slower or faster, with how much confidence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core import errors
from orchestrator.host import output

if TYPE_CHECKING:
    from orchestrator.analysis.comparison import RunComparison
    from orchestrator.core.measurement import Measurement


EPILOG = """\
examples:
  nightgrid compare last-night smoke                             significant changes first
  nightgrid compare last-night smoke --fail-on-regression 5%     for CI: exit code 11
  nightgrid compare on-gaudi on-h100 --allow device              the same settings on other cards

RUN is the name of a run in the results directory, or the path of a run's directory.

exit codes:
  0    compared; with --fail-on-regression: nothing got worse by that much
  11   with --fail-on-regression only: some job is slower by at least that much and the change is
       significant, or some job that worked does not any more
  6    there is nothing to compare: no job in common, or every pair is refused
  4    a run cannot be read

docs/compare.md says how a change is called significant and which rows are not comparable.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid compare`."""
    from orchestrator.commands.options import add_results_argument

    parser.add_argument("before", metavar="RUN_A", help="the run to compare with")
    parser.add_argument("after", metavar="RUN_B", help="the run in question")
    add_results_argument(parser)
    parser.add_argument(
        "--fail-on-regression",
        metavar="SHARE",
        type=share,
        help="exit with 11 if a job lost at least this share of its throughput, such as 5%%",
    )
    parser.add_argument(
        "--confidence", metavar="SHARE", type=share, default=0.95, help="default: 95%%"
    )
    parser.add_argument(
        "--noise",
        metavar="SHARE",
        type=share,
        help="standard deviation between two runs of the same thing (default: estimated)",
    )
    parser.add_argument(
        "--allow",
        metavar="KEY",
        action="append",
        default=[],
        help="compare although rows differ in this key; may be repeated. `device` matches the same "
        "settings across kinds of cards",
    )
    parser.add_argument("--all", action="store_true", help="list unchanged jobs too")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Compare and print.

    Raises:
        StoreError: a run cannot be read.
        NotComparable: no pair of rows may be compared.
    """
    from orchestrator.analysis.comparison import RULES, compare
    from orchestrator.core.errors import NotComparable

    forgivable = [rule.key for rule in RULES if rule.effect == "blocks" and rule.forgivable]
    for key in args.allow:
        if key not in forgivable:
            raise NotComparable(f"--allow {key}: only {', '.join(forgivable)} can be allowed")
    comparison = compare(
        newest_rows(args.results, args.before),
        newest_rows(args.results, args.after),
        names=(args.before, args.after),
        confidence=args.confidence,
        noise=args.noise,
        allow=frozenset(args.allow),
    )
    if args.json:
        from orchestrator.report.comparison_text import comparison_json

        output.say_json(comparison_json(comparison, args.fail_on_regression), indent=2)
    else:
        from orchestrator.report.comparison_text import print_comparison

        print_comparison(comparison, output.console(highlight=False), every=args.all)
    if not comparison.changes and not comparison.broken:
        raise NotComparable(nothing(comparison))
    return verdict(comparison, args.fail_on_regression)


def verdict(comparison: RunComparison, limit: float | None) -> int:
    """The exit code."""
    if limit is None:
        return 0
    worse = comparison.regressions(limit) or comparison.broken
    return errors.REGRESSION if worse else errors.OK


def nothing(comparison: RunComparison) -> str:
    """Reason why no pair of rows could be compared."""
    if comparison.refused:
        keys = dict.fromkeys(d.key for r in comparison.refused for d in r.differences)
        return (
            f"none of the {len(comparison.refused):,} jobs that both runs measured is comparable: "
            f"they differ in {', '.join(keys)}"
        )
    return (
        f"{comparison.before} and {comparison.after} have no job in common that both measured "
        f"({comparison.only_before:,} jobs only in the first, {comparison.only_after:,} only in "
        "the second); --allow device matches the same settings on other cards"
    )


def newest_rows(results: Path, run: str) -> tuple[Measurement, ...]:
    """The newest final row of each cell of a run, with raw samples; replicates are joined.

    Raises:
        StoreError: there is no such run, or it cannot be read.
    """
    from orchestrator.analysis.flags import raised_by_job
    from orchestrator.analysis.replicates import join
    from orchestrator.analysis.selection import newest_final, settings_of
    from orchestrator.results.finding import find_run
    from orchestrator.results.passports import spread_between_runs

    store = find_run(run, results)
    rows = newest_final(store.measurements())
    raised = raised_by_job(rows)
    differ = spread_between_runs(store.path)
    return join(rows, settings_of(rows, raised), raised, runs=differ).rows


def share(text: str) -> float:
    """``5%`` or ``0.05`` as 0.05.

    Raises:
        argparse.ArgumentTypeError: it is not a share between 0 and 1.
    """
    number = text.strip()
    try:
        value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 5%")
    return value
