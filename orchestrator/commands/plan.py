"""``nightgrid plan FILE``: what a run would do, and why; starts nothing, writes nothing."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrator.commands.options import (
    add_deadline_arguments,
    add_results_argument,
    add_set_argument,
    ends_at,
)
from orchestrator.grid.yaml import found
from orchestrator.host import output

if TYPE_CHECKING:
    from orchestrator.core.plan import PastRow, Plan
    from orchestrator.planning.forecast import Forecast

_NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def add_grid_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The options that decide what a plan is: `nightgrid run` takes the same."""
    parser.add_argument(
        "grid",
        metavar="FILE",
        nargs="?" if optional else None,
        type=found,
        help="the grid file (docs/grids.md), or the name of one that comes with Nightgrid",
    )
    parser.add_argument(
        "--emulate",
        metavar="SPEC",
        help="emulated nodes: 2x8 is two nodes of eight cards; also 2x8:GPU or 1x8:HPU,1x2:CPU",
    )
    add_results_argument(parser, "where runs keep their rows", of_a_grid=True)
    parser.add_argument(
        "--run",
        metavar="NAME",
        dest="run_name",  # `args.run` is the command itself
        help="name of the run: a new one, or one to go on with (default: the grid's name)",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="run jobs again that failed earlier"
    )
    parser.add_argument(
        "--force", action="store_true", help="run all jobs, measured already or not"
    )
    add_set_argument(parser)


EPILOG = """\
examples:
  nightgrid plan grids/smoke.yaml --emulate 2x8           every job, and why some will not run
  nightgrid plan grids/smoke.yaml --address http://head:8265    on the cluster that is there
  nightgrid plan grids/smoke.yaml --json | jq .summary    for scripts
  nightgrid run grids/smoke.yaml --emulate 2x8            executes this very plan
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid plan`."""
    add_grid_arguments(parser)
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="plan for the cards of this cluster: http://HEAD:8265 (the dashboard, from anywhere) "
        "or HOST:6379 (on a machine of it); default: this machine's cards, else a server of each "
        "kind",
    )
    add_deadline_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def plan_of(args: argparse.Namespace) -> tuple[Plan, list[PastRow]]:
    """The plan for the command line's grid, nodes and results, and the earlier rows of its run.

    Raises:
        GridError: the grid is refused.
        OptionError: the emulated nodes make no sense.
        StoreError: earlier rows cannot be read.
    """
    from orchestrator.driver.options import RunOptions
    from orchestrator.driver.plan import plan_grid

    options = RunOptions(
        results=args.results,
        results_named=args.results_named,
        name=args.run_name,
        overrides=tuple(args.overrides),
        emulate=args.emulate,
        address=getattr(args, "address", None),  # `simulate` has none
        retry_failed=args.retry_failed,
        force=args.force,
    )
    return plan_grid(args.grid, options)


@contextlib.contextmanager
def _in_a_short_life() -> Iterator[None]:
    """Switch off the garbage collector and pydantic's plugins for a short-lived process. All
    objects live to the end, so a collection would find nothing, nor would the one as the
    interpreter ends; and pydantic would look for plugins in all packages that are installed."""
    collecting = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)
    plugins = os.environ.get(_NO_PLUGINS)
    os.environ[_NO_PLUGINS] = plugins or "__all__"
    try:
        yield
    finally:
        if plugins is None:
            del os.environ[_NO_PLUGINS]
        if collecting:
            gc.enable()


@_in_a_short_life()
def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    plan, history = plan_of(args)
    lines, found = _until(args, plan, history)
    if args.json:
        from orchestrator.watching.plan_text import plan_json

        output.emit_json(plan_json(plan, found) + "\n")
        return 0
    from orchestrator.watching.plan_text import print_plan

    terminal = None
    if sys.stdout.isatty():
        terminal = output.console()
    print_plan(plan, sys.stdout, terminal, lines)
    return 0


def _until(
    args: argparse.Namespace, plan: Plan, history: list[PastRow]
) -> tuple[list[str], Forecast | None]:
    """Consequences of a deadline for a run that starts now."""
    at = ends_at(args)
    if at is None:
        return [], None
    from orchestrator.core.deadline import Deadline
    from orchestrator.driver.plan import forecast_of
    from orchestrator.watching.plan_text import deadline_lines

    deadline = Deadline.of(at, now=time.time(), jobs=len(plan.jobs))
    found = forecast_of(plan, history, deadline)
    return list(deadline_lines(deadline, found)), found
