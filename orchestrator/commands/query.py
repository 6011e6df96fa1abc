"""``nightgrid query "select …"``: SQL over the rows of all runs."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from typing import TYPE_CHECKING

from orchestrator.commands.options import add_results_argument, add_runs_argument
from orchestrator.host import output

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.report.query import Answer

#: Rows of more columns than fit on a line that are shown, some sixty lines each.
MOST_RECORDS = 20

#: Letters to which a table is measured; no terminal is wider.
MOST_WIDTH = 100_000

EPILOG = """\
views: rows (attempts), jobs (the newest final row of each job in each run), samples (timed
batches), items (prompts). `nightgrid schema results` lists the columns.

examples:
  nightgrid query "select run, state, count(*) from jobs group by all order by all"
  nightgrid query "select precision, max(throughput) from jobs where not emulated group by 1"
  nightgrid query "select job_id, repeat, sum(wall_s) from samples where not warmup group by all"
  nightgrid query "select parameters['output_tokens'] as output_tokens, throughput from jobs"

exit codes: 0 answered; 2 the statement is refused; 4 no runs, or a run cannot be read;
7 duckdb is not installed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid query`."""
    parser.add_argument("sql", metavar="SQL", help="one statement; - reads it from standard input")
    add_results_argument(parser)
    add_runs_argument(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a JSON array of objects")
    form.add_argument("--csv", action="store_true", help="comma-separated values")


def run(args: argparse.Namespace) -> int:
    """Answer and print.

    Raises:
        ExtraMissing: duckdb is not installed.
        StoreError: there are no runs, or one cannot be read.
        QueryError: the statement is refused.
    """
    from orchestrator.report.query import query

    sql = sys.stdin.read() if args.sql == "-" else args.sql
    answer = query(args.results, sql, args.run_names)
    for damage in answer.damaged:
        output.say_aside(f"nightgrid query: not read: {damage}")
    if args.json:
        _print_json(answer)
    elif args.csv:
        _print_csv(answer)
    else:
        _print_table(answer)
    return 0


def _print_json(answer: Answer) -> None:
    from orchestrator.report.query import plain_value

    records = [{k: plain_value(v) for k, v in record.items()} for record in answer.records()]
    output.say_json(records, ensure_ascii=False, indent=1)


def _print_csv(answer: Answer) -> None:
    from orchestrator.report.query import plain_value
    from orchestrator.util.format import csv_field

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(csv_field, answer.columns))
    for row in answer.rows:
        writer.writerow(_csv_text(plain_value(value)) for value in row)


def _csv_text(value: object) -> str:
    from orchestrator.host.visible import visible_json
    from orchestrator.report.figures import plain

    if isinstance(value, (dict, list)):
        return visible_json(json.dumps(value, ensure_ascii=False))
    return plain(value)


def _print_table(answer: Answer) -> None:
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from orchestrator.report.query import plain_value
    from orchestrator.util.format import one_line

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    numbers = [
        all(isinstance(row[i], (int, float)) or row[i] is None for row in answer.rows)
        for i in range(len(answer.columns))
    ]
    for column, number in zip(answer.columns, numbers, strict=True):
        table.add_column(Text(one_line(column)), justify="right" if number else "left")
    for row in answer.rows:
        table.add_row(*(Text(one_line(_shown(plain_value(value)))) for value in row))
    console = output.console(highlight=False)
    unbounded = console.options.update(max_width=MOST_WIDTH)
    if answer.rows and Measurement.get(console, unbounded, table).minimum > console.width:
        _print_records(answer, console)
    else:
        console.print(table)
    count = len(answer.rows)
    console.print(f"{count:,} {'row' if count == 1 else 'rows'}", style="dim")


def _print_records(answer: Answer, console: Console) -> None:
    """Each row as lines of a column and its value, for more columns than a line has room for."""
    from rich.text import Text

    from orchestrator.report.query import plain_value
    from orchestrator.util.format import one_line

    names = [one_line(column) for column in answer.columns]
    widest = max(map(len, names))
    for number, row in enumerate(answer.rows[:MOST_RECORDS], start=1):
        console.print(Text(f"row {number:,}", style="bold"))
        for name, value in zip(names, row, strict=True):
            shown = one_line(_shown(plain_value(value)))
            if shown:
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
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.6g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
