"""``nightgrid schema [grid|results|precisions]``: what may stand in a grid, what stands in result
tables, and what each precision means on each device."""

from __future__ import annotations

import argparse
import dataclasses

from orchestrator.host import output

EPILOG = """\
examples:
  nightgrid schema > grid.schema.json      for an editor that completes YAML
  nightgrid schema results                 every column of the result tables
  nightgrid schema precisions --json       what runs where
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid schema`."""
    parser.add_argument(
        "of",
        metavar="{grid,results,precisions}",
        nargs="?",
        choices=("grid", "results", "precisions"),
        default="grid",
        help="grid: JSON Schema of grid files (default); results: columns of result tables; "
        "precisions: what each means on cpu, cuda and hpu, and what is unsupported",
    )
    parser.add_argument(
        "--json", action="store_true", help="tables as JSON (the schema of grid files is JSON)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    if args.of == "grid":
        from orchestrator.grid.schema import grid_schema_text

        output.emit_json(grid_schema_text())
        return 0
    if args.of == "results":
        _print_columns(as_json=args.json)
    else:
        _print_precisions(as_json=args.json)
    return 0


def _print_precisions(*, as_json: bool) -> None:
    from workloads.precision import table

    if as_json:
        output.say_json([dataclasses.asdict(row) for row in table()], indent=1)
        return
    for row in table():
        unsupported = "" if row.supported else "unsupported: "
        engine = f"engine {row.engine}: " if row.engine else ""
        output.say(f"{row.precision:<5}  {row.device:<5} {engine}{unsupported}{row.text}")


def _print_columns(*, as_json: bool) -> None:
    from orchestrator.results.schema import SCHEMA_VERSION, schema

    headings = ("column", "type", "unit", "meaning")
    columns = []
    for column in schema():
        told = {k.decode(): v.decode() for k, v in (column.metadata or {}).items()}
        values = (column.name, str(column.type), told.get("unit", ""), told.get("description", ""))
        columns.append(values)
    if as_json:
        named = [dict(zip(headings, values, strict=True)) for values in columns]
        output.say_json({"version": SCHEMA_VERSION, "columns": named}, indent=1)
        return
    rows = [headings, *((name, _short(kind), *rest) for name, kind, *rest in columns)]
    widths = [max(len(row[index]) for row in rows) for index in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        output.say("  ".join([*cells, row[3]]).rstrip())
    output.say(f"\nSchema version {SCHEMA_VERSION}; docs/schema.md has the nested types.")


def _short(kind: str) -> str:
    return kind if len(kind) <= 28 else kind.partition("<")[0] + "<…>"
