"""Options that several commands share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.core.deadline import parse_budget, parse_deadline
from orchestrator.core.errors import OptionError
from orchestrator.grid import grid_path
from orchestrator.store.files import (
    default_address,
    default_results_dir,
    directory_of,
    is_address,
)
from orchestrator.util import output

if TYPE_CHECKING:
    from orchestrator.driver.options import RunOptions

T = TypeVar("T", int, float)
P = TypeVar("P")


def number(kind: type[T], low: float, high: float, wanted: str) -> Callable[[str], T]:
    """Argument type: numbers from ``low`` to ``high``; errors call them ``wanted``."""

    def parse(text: str) -> T:
        try:
            value = kind(text)  # type: ignore[call-arg]
        except ValueError:
            value = kind(low) - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not {wanted}")
        return value

    return parse


#: Options that several commands share, as argparse declares them.
SHARED: Mapping[str, Mapping[str, Any]] = {
    "--set": {
        "metavar": "PATH=VALUE",
        "action": "append",
        "dest": "overrides",
        "default": [],
        "help": "set this in the grid: model=DIR, axes.batch_size=1..8, measure.max_repeats=5, of "
        "every experiment, or of one with NAME. before it; may be repeated",
    },
    "--priority": {
        "metavar": "N",
        "type": int,
        "default": 0,
        "help": "on a busy cluster, go before waiting runs of a lower one (default: 0; may be "
        "below)",
    },
    "--wait-for-cards": {
        "metavar": "SECONDS",
        "type": number(float, 0, 86_400, "between 0 and 86400 seconds"),
        "default": 0.0,
        "help": "wait so long for nodes of the cluster, until every job's cards are there "
        "(default: 0; jobs without cards become UNSUPPORTED rows)",
    },
    "--run": {
        "metavar": "NAME",
        "action": "append",
        "dest": "run_names",
        "default": [],
        "help": "only this run; may be repeated (default: all)",
    },
    "--notify": {
        "metavar": "HOOK",
        "action": "append",
        "default": [],
        "help": "tell when the run has ended, however: an address that takes JSON by POST (Slack "
        "and its like), a command that gets it on stdin, or @FILE with either in it; may be "
        "repeated (default: $NIGHTGRID_NOTIFY)",
    },
    "--verbose": {
        "action": "store_true",
        "help": "print the table of cards and the versions, too; the page has both",
    },
    "--json": {"action": "store_true", "help": "JSON on standard output"},
}


def add(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add options of ``SHARED``."""
    for name in names:
        parser.add_argument(name, **SHARED[name])


def print_answer(args: argparse.Namespace, value: object, *lines: str, **options: Any) -> int:
    """Print a value as JSON where ``--json`` asks for it, else these lines; returns 0."""
    if args.json:
        output.say_json(value, **options)
    else:
        output.say("\n".join(lines))
    return 0


def add_results_argument(
    parser: argparse.ArgumentParser,
    what: str = "where runs lie",
    *,
    of_a_grid: bool = False,
    or_there: bool = False,
) -> None:
    """Add ``--results DIR``, the place of ``what``, a path. ``of_a_grid``: a grid may name others
    (``run_options``), ``or_there``: it may be on a cluster's head; both a text (``results_here``).
    """
    first = "the grid's `results:`, else " if of_a_grid else ""
    last = "; with --address as the run was sent" if or_there else ""
    is_text = of_a_grid or or_there
    parser.add_argument(
        "--results",
        metavar="DIR",
        default=None if is_text else default_results_dir(),
        type=str if is_text else Path,
        help=f"{what} (default: {first}$NIGHTGRID_RESULTS, else ./results{last})"
        + ("; with s3://BUCKET/PREFIX or gs://… a copy goes there, too" if of_a_grid else ""),
    )


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """``--address`` of a cluster, and ``--results`` here or there; see ``results_here``."""
    parser.add_argument(
        "--address", metavar="URL", help="the cluster's dashboard, http://HEAD:8265"
    )
    where = "where runs lie: here, or with --address on the cluster's head"
    add_results_argument(parser, where, or_there=True)


def add_copy_argument(parser: argparse.ArgumentParser) -> None:
    """``--address`` of a cluster whose run is fetched to ``--results`` here; see ``named_run``."""
    parser.add_argument(
        "--address",
        metavar="URL",
        help="fetch the run from this cluster, http://HEAD:8265, as `nightgrid fetch` does",
    )


def named_run(args: argparse.Namespace) -> str:
    """The run that is named beside ``--address``; refused if none is."""
    if not args.run_name:
        args.refuse("name the run that --address has; `nightgrid runs --address` lists them")
    return str(args.run_name)


def results_here(args: argparse.Namespace) -> Path:
    """Directory of the results here, which an object store's address does not change; raises
    OptionError for ``~`` of an unknown user, or a variable."""
    if not args.results or is_address(args.results):
        return default_results_dir()
    try:
        return directory_of(args.results)
    except ValueError as error:
        raise OptionError(f"--results {error}") from None


def add_deadline_arguments(parser: argparse.ArgumentParser) -> None:
    """``--deadline`` or ``--budget``; see ``ends_at``."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--deadline",
        metavar="TIME",
        type=_explained(lambda text: parse_deadline(text, datetime.now().astimezone())),
        help="when the report must be there: 08:00 (the next one, on this machine's clock) or "
        "2026-11-22T08:00+01:00",
    )
    either.add_argument(
        "--budget",
        metavar="TIME",
        type=_explained(parse_budget),
        help="the same, counted from now: 9h, 90m, 1h30m",
    )


def ends_at(args: argparse.Namespace) -> float | None:
    """Deadline of the report in seconds since the epoch, or None."""
    if args.deadline is not None:
        moment: datetime = args.deadline
        return moment.timestamp()
    return None if args.budget is None else time.time() + args.budget


def _explained(parse: Callable[[str], P]) -> Callable[[str], P]:
    """Argument type whose ValueError's message the user sees."""

    def argument(text: str) -> P:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


whole_number = number(int, 1, inf, "a whole number from 1")


def run_options(args: argparse.Namespace, **others: Any) -> RunOptions:
    """Options of a run: the arguments that have their names, and others. ``--results`` is a
    directory, or an object store's address for a copy; both override the grid."""
    from orchestrator.driver.options import RunOptions

    names = [field.name for field in fields(RunOptions) if hasattr(args, field.name)]
    values = {name: getattr(args, name) for name in names if name not in others}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    address = args.results if is_address(args.results or "") else ""
    place = {
        "results": results_here(args),
        "results_address": address if args.results else default_address(),
        "results_named": bool(args.results),
    }
    counted = getattr(args, "budget", None) is not None
    return RunOptions(**{**values, **lists, **place, "budget": counted, **others})


def add_grid_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The options that decide what a plan is: `nightgrid run` takes the same."""
    parser.add_argument(
        "grid",
        metavar="FILE",
        nargs="?" if optional else None,
        type=grid_path,
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
        "--keep-changed",
        action="store_true",
        help="keep rows although the files of their model or dataset have changed since",
    )
    parser.add_argument(
        "--force", action="store_true", help="run all jobs, measured already or not"
    )
    parser.add_argument(
        "--key-file",
        type=lambda text: Path(text).absolute(),
        metavar="FILE",
        help="the key to models written by `nightgrid protect`: a file of each node, mode 0600",
    )
    add(parser, "--set")
