"""``nightgrid report``: tables in the terminal and one HTML page from a run's rows.

Reads what is there, also while the run is still writing, and never takes the run's lock.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.options import add_results_argument, add_verbose_argument
from orchestrator.core.errors import StoreError
from orchestrator.host import output
from orchestrator.host.visible import visible_json
from orchestrator.report.run_report import page_text, read_summary, write_aside
from orchestrator.results import paths
from orchestrator.util import format as units

if TYPE_CHECKING:
    from orchestrator.analysis.summary import Summary

FORMATS = ("terminal", "html", "md", "csv", "json", "vendor")
STANDARD_OUTPUT = Path("-")

EPILOG = """\
examples:
  nightgrid report                            the newest run: tables, and its HTML page
  nightgrid report smoke --format md          or terminal, csv, json, html, vendor
  nightgrid report --all                      one page over all runs: trends, change points
  nightgrid report smoke --figures figures    every figure as PNG and PDF, its data as CSV

docs/report.md says what each section is made from.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid report`."""
    parser.add_argument("run_name", nargs="?", metavar="RUN", help="default: the newest run")
    add_results_argument(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="only this (default: tables in the terminal, and the HTML page); vendor is CSV with "
        "model, cards, precision, lengths, batch and tokens/s",
    )
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="as --format json"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        dest="every",
        help="one page over all runs (DIR/report.html): jobs over nights, with change points",
    )
    add_verbose_argument(parser)
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="only write every figure as PNG and PDF, and its data as CSV, into this directory",
    )
    parser.add_argument(
        "--equal-quality",
        type=float,
        nargs="?",
        const=nan,
        metavar="LIMIT",
        help="draw fronts of those rows alone whose output was compared (quality: true) and counts "
        "as the plain path's: from LIMIT on, by default from what the figure declares",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write; - is standard output (default: the page to DIR/RUN/report.html, "
        "all else to standard output)",
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the report.

    Raises:
        StoreError: there is no such run, its rows cannot be read, or a file cannot be written.
    """
    from orchestrator.results.finding import find_run

    if args.every:
        return _every_run(args)
    store = find_run(args.run_name, args.results)
    # Figures and lengths are made from every prompt; all else needs no more than the rows.
    whole = args.figures is not None or args.format == "vendor"
    summary, measurements = read_summary(store, lean=not whole)
    if args.equal_quality is not None:
        from orchestrator.analysis.summary import at_equal_quality

        declared = isnan(args.equal_quality)
        summary = at_equal_quality(summary, None if declared else args.equal_quality)
    if args.figures is not None:
        write_figures(summary, args.figures)
        return 0
    page_path = args.output or store.path / paths.REPORT
    if args.format == "html":
        _deliver(page_text(store, summary, measurements), page_path)
    elif args.format is None:
        page = page_text(store, summary, measurements)
        if page_path == STANDARD_OUTPUT:
            output.emit(tables(summary, None, verbose=args.verbose))
            output.emit(page)
        else:
            where = str(write_aside(page_path, page).resolve())
            output.emit(tables(summary, None, verbose=args.verbose, page=where))
    else:
        path = args.output or STANDARD_OUTPUT
        _deliver(_text(summary, args.format, path, verbose=args.verbose), path)
    return 0


def _every_run(args: argparse.Namespace) -> int:
    """Write the page over all runs; say what changed, and what since the last run.

    Raises:
        StoreError: there is no run, or the page cannot be written.
    """
    from orchestrator.report import all_runs

    if args.run_name or args.format not in (None, "html") or args.figures:
        raise StoreError("--all is a page over all runs: name no RUN, no --format, no --figures")
    results = args.results
    lines, trends, damaged = all_runs.read_all(results)
    page = all_runs.render(results, lines, trends, damaged)
    if args.output == STANDARD_OUTPUT:
        output.emit(page)
        return 0
    path = write_aside(args.output or results / paths.REPORT, page).resolve()
    for text in damaged:
        output.say(f"not read: {text}")
    output.say(f"{units.plural(len(lines), 'run')} in {results}")
    output.say(all_runs.headline(trends))
    output.say(f"page: {path}")
    return 0


def write_figures(summary: Summary, directory: Path) -> None:
    """The CSV of every figure, then its pictures.

    Raises:
        ExtraMissing: the renderer is not installed; the CSV files are written.
        StoreError: a file has the directory's name, or a file cannot be written.
    """
    from orchestrator.report.figures import figure_data, write_csv, write_pictures

    if directory.exists() and not directory.is_dir():
        raise StoreError(f"--figures {directory}: a file has this name; give a folder's")
    tables = write_csv(figure_data(summary))
    for name, text in tables.items():
        write_aside(directory / name, text)
    output.say(f"data: {units.plural(len(tables), 'table')} in {directory.resolve()}")
    paths, left_out = write_pictures(summary, directory)
    more = f"; {left_out:,} more were not drawn, the tables have their data" if left_out else ""
    output.say(f"figures: {units.plural(len(paths), 'file')} in {directory.resolve()}{more}")


def tables(summary: Summary, path: Path | None, *, verbose: bool = False, page: str = "") -> str:
    """The terminal's tables as text, coloured if standard output is a terminal."""
    from orchestrator.report.terminal import print_summary

    to_screen = path in (None, STANDARD_OUTPUT)
    console = (
        output.console(highlight=False)
        if to_screen
        else output.console(highlight=False, width=100, color_system=None, force_terminal=False)
    )
    with console.capture() as capture:
        print_summary(summary, console, verbose=verbose, page=page)
    return capture.get()


def _text(summary: Summary, form: str, path: Path, *, verbose: bool) -> str | Iterable[str]:
    if form == "terminal":
        return tables(summary, path, verbose=verbose)
    if form == "md":
        from orchestrator.report.markdown import to_markdown

        return to_markdown(summary)
    if form == "vendor":
        from orchestrator.report.export import to_vendor_csv

        return to_vendor_csv(summary)
    from orchestrator.report.export import json_parts, to_csv

    return to_csv(summary) if form == "csv" else map(visible_json, json_parts(summary))


def _deliver(text: str | Iterable[str], path: Path) -> None:
    if path == STANDARD_OUTPUT:
        for part in [text] if isinstance(text, str) else text:
            output.emit(part)
    else:
        output.say(f"report: {write_aside(path, text).resolve()}")
