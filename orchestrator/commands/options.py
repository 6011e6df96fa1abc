"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestrator.results.directory import default_results_dir


def add_results_argument(parser: argparse.ArgumentParser) -> None:
    """``--results DIR``: where runs lie."""
    parser.add_argument(
        "--results",
        metavar="DIR",
        type=Path,
        default=default_results_dir(),
        help="where runs lie (default: $NIGHTGRID_RESULTS, else ./results)",
    )


def add_runs_argument(parser: argparse.ArgumentParser) -> None:
    """``--run NAME``, any number of times, as ``run_names``."""
    parser.add_argument(
        "--run",
        metavar="NAME",
        action="append",
        dest="run_names",
        default=[],
        help="only this run; may be repeated (default: all)",
    )


def add_notify_argument(parser: argparse.ArgumentParser) -> None:
    """``--notify``, any number of times."""
    parser.add_argument(
        "--notify",
        metavar="HOOK",
        action="append",
        default=[],
        help="tell when the run has ended, however: an address that takes JSON by POST (Slack and "
        "its like), a command that gets it on stdin, or @FILE with either in it; may be repeated "
        "(default: $NIGHTGRID_NOTIFY)",
    )
