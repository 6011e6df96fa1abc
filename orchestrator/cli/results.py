"""Commands for the morning: ``report``, ``compare``, ``query`` and ``export``."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from math import isnan, nan
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement as Extent
from rich.table import Table
from rich.text import Text

from orchestrator.analysis.comparison import RULES, RunComparison, compare
from orchestrator.analysis.flags import Raised, raised_by_job
from orchestrator.analysis.replicates import join
from orchestrator.analysis.selection import newest_final, settings_of
from orchestrator.analysis.summary import Summary, at_equal_quality
from orchestrator.cli import options as shared
from orchestrator.core import errors
from orchestrator.core.errors import NotComparable, StoreError
from orchestrator.core.measurement import Measurement
from orchestrator.grid.parser import load_grid
from orchestrator.on_ray.run_status import RunCopy
from orchestrator.report import all_runs, exchange, export
from orchestrator.report.atlas import LARGEST_BYTES, atlas_of, from_json, merged, to_json
from orchestrator.report.figure_data import figure_csv, plain
from orchestrator.report.figures import write_pictures
from orchestrator.report.query import Answer, plain_value, query
from orchestrator.report.run_report import page_text, read_published, read_summary, write_aside
from orchestrator.report.text import print_comparison, print_summary, to_markdown
from orchestrator.store import files as run_files
from orchestrator.store.history import spread_between_runs
from orchestrator.store.store import Store, existing_runs, find_run
from orchestrator.trackers.base import TRACKERS, Backlog, Tracker
from orchestrator.util import format as units
from orchestrator.util import output
from orchestrator.util.format import one_line
from orchestrator.util.output import visible_json
from workloads.util import files

#: Formats of other tools for loads of served models (``orchestrator.report.exchange``).
OF_OTHERS = ("llm-d", "aiperf", "vllm-bench")
FORMATS = ("terminal", "html", "md", "csv", "json", "vendor", *OF_OTHERS)
STANDARD_OUTPUT = Path("-")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid report                            the newest run: tables, and its HTML page
      nightgrid report smoke --format md          or terminal, csv, json, html, vendor
      nightgrid report smoke --address http://head:8265      fetches the run first
      nightgrid report --all                      one page over all runs: trends, change points
      nightgrid report smoke --figures figures    every figure as PNG and PDF, its data as CSV

    docs/report.md says what each section is made from.
    """
    parser.add_argument("run_name", nargs="?", metavar="RUN", help="default: the newest run")
    shared.add_results_argument(parser)
    shared.add_copy_argument(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="only this (default: tables in the terminal, and the HTML page); vendor is CSV with "
        "model, cards, precision, lengths, batch and tokens/s; llm-d, aiperf and vllm-bench are "
        "JSON of those tools, a line for each load of a served model",
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
    shared.add(parser, "--verbose")
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
        "--published",
        type=Path,
        metavar="FILE",
        help="CSV of published figures to set beside this run's, such as a dump of InferenceX "
        "(docs/report.md)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write; - is standard output (default: the page to DIR/RUN/report.html, "
        "all else to standard output)",
    )


def run_report(args: argparse.Namespace) -> int:
    """Print or write the report."""
    if args.every:
        return _every_run(args)
    if args.address:
        copy = RunCopy(args.address, shared.named_run(args), args.results)
        copy.copy()
        args.run_name = copy.name
    store = find_run(args.run_name, args.results)
    # Figures and lengths are made from every prompt; all else needs no more than the rows.
    whole = args.figures is not None or args.format == "vendor"
    published = read_published(args.published) if args.published is not None else ()
    summary, measurements = read_summary(store, lean=not whole, published=published)
    if args.equal_quality is not None:
        declared = isnan(args.equal_quality)
        summary = at_equal_quality(summary, None if declared else args.equal_quality)
    page_path = args.output or store.path / run_files.REPORT
    if args.figures is not None:
        write_figures(summary, args.figures)
    elif args.format == "html":
        _deliver(page_text(store, summary, measurements), page_path)
    elif args.format is not None:
        path = args.output or STANDARD_OUTPUT
        _deliver(_text(summary, args.format, path, verbose=args.verbose), path)
    else:
        page = page_text(store, summary, measurements)
        aside = page_path != STANDARD_OUTPUT
        where = str(write_aside(page_path, page).resolve()) if aside else ""
        output.emit(tables(summary, None, verbose=args.verbose, page=where))
        if not aside:
            output.emit(page)
    return 0


def _every_run(args: argparse.Namespace) -> int:
    if args.run_name or args.format not in (None, "html") or args.figures:
        raise StoreError("--all is a page over all runs: name no RUN, no --format, no --figures")
    results = args.results
    lines, trends, damaged = all_runs.read_all(results)
    page = all_runs.render(results, lines, trends, damaged)
    if args.output == STANDARD_OUTPUT:
        output.emit(page)
        return 0
    path = write_aside(args.output or results / run_files.REPORT, page).resolve()
    for text in damaged:
        output.say(f"not read: {text}")
    output.say(f"{units.plural(len(lines), 'run')} in {results}")
    output.say(all_runs.headline(trends))
    output.say(f"page: {path}")
    return 0


def write_figures(summary: Summary, directory: Path) -> None:
    """Write the CSV of every figure, then its pictures (their renderer may be missing)."""
    if directory.exists() and not directory.is_dir():
        raise StoreError(f"--figures {directory}: a file has this name; give a folder's")
    tables = figure_csv(summary)
    for name, text in tables.items():
        write_aside(directory / name, text)
    output.say(f"data: {units.plural(len(tables), 'table')} in {directory.resolve()}")
    paths, left_out = write_pictures(summary, directory)
    more = f"; {left_out:,} more were not drawn, the tables have their data" if left_out else ""
    output.say(f"figures: {units.plural(len(paths), 'file')} in {directory.resolve()}{more}")


def tables(summary: Summary, path: Path | None, *, verbose: bool = False, page: str = "") -> str:
    """The terminal's tables as text, coloured if standard output is a terminal."""
    plain: dict[str, Any] = {"width": 100, "color_system": None, "force_terminal": False}
    to_screen = path in (None, STANDARD_OUTPUT)
    console = output.console(highlight=False, **({} if to_screen else plain))
    with console.capture() as capture:
        print_summary(summary, console, verbose=verbose, page=page)
    return capture.get()


def _text(summary: Summary, form: str, path: Path, *, verbose: bool) -> str | Iterable[str]:
    if form == "terminal":
        return tables(summary, path, verbose=verbose)
    if form == "md":
        return to_markdown(summary)
    if form in OF_OTHERS:
        loads = list(exchange.lines(summary.rows, form))
        if not loads:
            why = "no row has a load of a served model, which alone this format holds"
            output.say_aside(f"nightgrid report: {summary.run}: {why}")
        return loads
    if form == "json":
        return map(visible_json, export.json_parts(summary))
    return export.to_vendor_csv(summary) if form == "vendor" else export.to_csv(summary)


def _deliver(text: str | Iterable[str], path: Path) -> None:
    if path == STANDARD_OUTPUT:
        for part in [text] if isinstance(text, str) else text:
            output.emit(part)
    else:
        output.say(f"report: {write_aside(path, text).resolve()}")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid compare last-night smoke                            significant changes first
      nightgrid compare last-night smoke --fail-on-regression 5%    for CI: exit code 11
      nightgrid compare on-gaudi on-h100 --allow device             the same settings on other cards

    RUN is the name of a run in the results directory, or the path of a run's directory.

    exit codes:
      0    compared; with --fail-on-regression: nothing got worse by that much
      11   with --fail-on-regression only: some job is slower by at least that much and the change
           is significant, or some job that worked does not any more
      6    there is nothing to compare: no job in common, or every pair is refused
      4    a run cannot be read

    docs/statistics.md says how a change is called significant and which rows are not comparable.
    """
    parser.add_argument("before", metavar="RUN_A", help="the run to compare with")
    parser.add_argument("after", metavar="RUN_B", help="the run in question")
    shared.add_results_argument(parser)
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
    shared.add(parser, "--json")


def run_compare(args: argparse.Namespace) -> int:
    """Compare and print."""
    forgivable = [rule.key for rule in RULES if rule.effect == "blocks" and rule.forgivable]
    for key in args.allow:
        if key not in forgivable:
            raise NotComparable(f"--allow {key}: only {', '.join(forgivable)} can be allowed")
    (before, flags_before), (after, flags_after) = (
        newest_rows(args.results, run) for run in (args.before, args.after)
    )
    comparison = compare(
        before,
        after,
        flags=(flags_before, flags_after),
        names=(args.before, args.after),
        confidence=args.confidence,
        noise=args.noise,
        allow=frozenset(args.allow),
    )
    if args.json:
        output.say_json(export.comparison_json(comparison, args.fail_on_regression), indent=2)
    else:
        print_comparison(comparison, output.console(highlight=False), every=args.all)
    if not comparison.changes and not comparison.broken:
        raise NotComparable(_nothing(comparison))
    limit = args.fail_on_regression
    worse = limit is not None and (comparison.regressions(limit) or comparison.broken)
    return errors.REGRESSION if worse else errors.OK


def _nothing(comparison: RunComparison) -> str:
    """Reason why no pair of rows could be compared."""
    if comparison.refused:
        every = [one for pair in comparison.refused for one in pair.differences]
        differ = dict.fromkeys(one.key for one in every if one.before != one.after)
        same = dict.fromkeys(one.key for one in every if one.key not in differ)
        why = [f"they differ in {', '.join(differ)}"] if differ else []
        why += [f"both have {', '.join(same)} that forbid it"] if same else []
        strict = {rule.key for rule in RULES if not rule.forgivable}
        keys = {**differ, **same}
        allow = "" if strict & keys.keys() else " ".join(f"--allow {key}" for key in keys)
        return (
            f"none of the {len(comparison.refused):,} jobs that both runs measured is comparable: "
            f"{', and '.join(why)}{allow and f'; {allow} compares them nevertheless'}"
        )
    return (
        f"{comparison.before} and {comparison.after} have no job in common that both measured "
        f"({comparison.only_before:,} jobs only in the first, {comparison.only_after:,} only in "
        "the second); --allow device matches the same settings on other cards"
    )


def newest_rows(
    results: Path, run: str
) -> tuple[tuple[Measurement, ...], dict[str, tuple[Raised, ...]]]:
    """The newest final row of each cell of a run (replicates are joined), with raw samples, and the
    flags of these rows; says which files could not be read."""
    store = find_run(run, results)
    contents = store.read()
    for damage in contents.damaged:
        output.say_aside(f"nightgrid compare: not read: {damage}")
    rows = newest_final(contents.measurements)
    raised, differ = raised_by_job(rows), spread_between_runs(store.path)
    joined = join(rows, settings_of(rows, raised), raised, runs=differ)
    # A cell has the flags of its replicates: its own figures are means and sums over several
    # processes, which the samples of one, that it still has, contradict.
    of_cells: dict[str, tuple[Raised, ...]] = {}
    for cell in joined.cells:
        own = (one for row in cell.counted for one in raised.get(row.job_id, ()))
        of_cells[cell.row.job_id] = tuple({one.flag.name: one for one in own}.values())
    return joined.rows, raised | of_cells


def share(text: str) -> float:
    """``5%`` or ``0.05`` as 0.05."""
    number = text.strip()
    try:
        value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 5%")
    return value


#: Rows of more columns than fit on a line that are shown, some sixty lines each.
MOST_RECORDS = 20

#: Letters to which a table is measured; no terminal is wider.
MOST_WIDTH = 100_000


def add_query_arguments(parser: argparse.ArgumentParser) -> None:
    """views: rows (attempts), jobs (the newest final row of each job in each run), samples (timed
    batches), items (prompts). `nightgrid schema results` lists the columns.

    examples:
      nightgrid query "select run, state, count(*) from jobs group by all order by all"
      nightgrid query "select precision, max(throughput) from jobs where not emulated group by 1"
      nightgrid query "select job_id, sum(wall_s) from samples where not warmup group by all"
      nightgrid query "select parameters['output_tokens'] as output_tokens, throughput from jobs"

    exit codes: 0 answered; 2 the statement is refused; 4 no runs, or a run cannot be read;
    7 duckdb is not installed
    """
    parser.add_argument("sql", metavar="SQL", help="one statement; - reads it from standard input")
    shared.add_results_argument(parser)
    shared.add(parser, "--run")
    form = parser.add_mutually_exclusive_group()
    shared.add(form, "--json")
    form.add_argument("--csv", action="store_true", help="comma-separated values")


def run_query(args: argparse.Namespace) -> int:
    """Answer and print."""
    sql = sys.stdin.read() if args.sql == "-" else args.sql
    answer = query(args.results, sql, args.run_names)
    for damage in answer.damaged:
        output.say_aside(f"nightgrid query: not read: {damage}")
    if args.json:
        records = [{k: plain_value(v) for k, v in record.items()} for record in answer.records()]
        output.say_json(records, ensure_ascii=False, indent=1)
    elif args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(map(units.csv_field, answer.columns))
        for row in answer.rows:
            writer.writerow(_csv_text(plain_value(value)) for value in row)
    else:
        _print_table(answer)
    return 0


def _csv_text(value: object) -> str:
    if isinstance(value, (dict, list)):
        return visible_json(json.dumps(value, ensure_ascii=False))
    return plain(value)


def _print_table(answer: Answer) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index, column in enumerate(answer.columns):
        number = all(isinstance(row[index], (int, float, type(None))) for row in answer.rows)
        table.add_column(Text(one_line(column)), justify="right" if number else "left")
    for row in answer.rows:
        table.add_row(*(Text(_shown(value)) for value in row))
    console = output.console(highlight=False)
    unbounded = console.options.update(max_width=MOST_WIDTH)
    if answer.rows and Extent.get(console, unbounded, table).minimum > console.width:
        _print_records(answer, console)
    else:
        console.print(table)
    console.print(units.plural(len(answer.rows), "row"), style="dim")


def _print_records(answer: Answer, console: Console) -> None:
    """Each row as lines of a column and its value, for more columns than a line has room for."""
    names = [one_line(column) for column in answer.columns]
    widest = max(map(len, names))
    for number, row in enumerate(answer.rows[:MOST_RECORDS], start=1):
        console.print(Text(f"row {number:,}", style="bold"))
        for name, value in zip(names, row, strict=True):
            if shown := _shown(value):
                line = Text(f"  {name:{widest}}  {shown}")
                line.truncate(console.width, overflow="ellipsis")
                console.print(line)
    left_out = len(answer.rows) - MOST_RECORDS
    more = f"; {left_out:,} rows are not shown" if left_out > 0 else ""
    console.print(
        f"{len(names)} columns are wider than this terminal, so each stands on a line of its own "
        f"(empty ones do not){more}. Name the columns that you want; --json and --csv have all.",
        style="dim",
    )


def _shown(value: object) -> str:
    value = plain_value(value)
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, (dict, list)):
        return one_line(json.dumps(value, ensure_ascii=False))
    return "" if value is None else one_line(str(value))


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid export rows --to datasets
      nightgrid export http://127.0.0.1:5000 --to mlflow --run smoke
      nightgrid export atlas.json --atlas grids/gaudi-atlas.yaml --merge theirs.json

    datasets: a directory for Hugging Face `datasets`, with configurations rows, samples and items:
      from datasets import load_dataset
      load_dataset("DEST", "rows", split="train")

    mlflow: the tracking server or database DEST, http://127.0.0.1:5000 or sqlite:///mlflow.db; one
    experiment a run, one MLflow run a job. wandb: the project DEST of Weights & Biases; its files
    lie beside the rows. What is there already is left alone, so it can be done every morning.
    `nightgrid run --log-to` does the same while rows come.

    --atlas: one JSON file with every cell of the grid, and where it was run (by nobody, emulated by
    the card's own libraries, on a card) with dates, by the rows of this results directory. Another
    site merges it into its own with --merge; bundles can be merged in any order, and again.

    exit codes: 0 written; 4 no runs, a run cannot be read, or DEST cannot be written or refuses
    rows, which are named when the others are written; 7 mlflow or wandb is not installed
    """
    parser.add_argument(
        "destination",
        metavar="DEST",
        help="datasets: a new directory; mlflow: a tracking URI; wandb: [ENTITY/]PROJECT; "
        "--atlas: a file",
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", choices=("datasets", *TRACKERS), help="what to write")
    target.add_argument("--atlas", metavar="GRID", help="write the atlas of this grid")
    parser.add_argument(
        "--merge",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="with --atlas: add what another site's bundle knows; may be repeated",
    )
    shared.add_results_argument(parser)
    shared.add(parser, "--run", "--json")


def run_export(args: argparse.Namespace) -> int:
    """Write the export."""
    if args.merge and args.atlas is None:
        raise StoreError("--merge belongs to --atlas")
    refused: list[str] = []
    destination = args.destination
    if args.atlas is not None:
        written, what = _write_atlas(args), "cells by"
    elif args.to != "datasets":
        written, what = dict(_track(TRACKERS[args.to], args, refused)), "new jobs of"
    else:
        destination = str(Path(destination).resolve())
        written, what = export.export_datasets(args.results, Path(destination), args.run_names), ""
    parts = (f"{count:,} {what} {name}".replace("  ", " ") for name, count in written.items())
    report = {"destination": destination, "written": written}
    shared.print_answer(args, report, f"{destination}: {', '.join(parts)}")
    if refused:
        raise StoreError("; ".join(refused))
    return 0


def _track(
    tracker: Tracker, args: argparse.Namespace, refused: list[str]
) -> Iterator[tuple[str, int]]:
    """Log the newest final rows of each run to a tracker; yields runs with counts of new rows, and
    adds refusals to ``refused``."""
    destination = tracker.destination_of(args.destination)
    for name in args.run_names or sorted(existing_runs(args.results)):
        store = find_run(name, args.results)
        done = Backlog(tracker, destination, name, store.path)
        done.rows.extend(newest_final(store.measurements(samples=False)))
        done.finish()
        if done.refusals:
            refused.append(f"{name}: of its rows {done.refusals}")
        yield name, done.written


def _write_atlas(args: argparse.Namespace) -> dict[str, int]:
    """Write the atlas bundle of a grid, with or without runs; returns its cells by status."""
    grid = load_grid(args.atlas, check_data=False)
    runs = args.run_names or (existing_runs(args.results) if args.results.is_dir() else ())
    rows = (row for run in runs for row in Store.existing(args.results, run).measurements())
    bundles = []
    for path in args.merge:
        try:
            text = files.read_text(path, limit_bytes=LARGEST_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StoreError(f"cannot read {path}: {reason}") from error
        bundles.append(from_json(text, str(path)))
    atlas = merged(atlas_of(grid.name, grid.jobs(), rows), *bundles)
    write_aside(Path(args.destination), to_json(atlas))
    return atlas.counts()
