"""``nightgrid schema [grid|results|precisions]``: what may stand in a grid, what stands in result
tables, and what each precision means on each device."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid schema`."""
    parser.add_argument(
        "of",
        nargs="?",
        choices=("grid", "results", "precisions"),
        default="grid",
        help="grid: JSON Schema of grid files (default); results: columns of result tables; "
        "precisions: what each means on cpu, cuda and hpu, and what is unsupported",
    )


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    if args.of == "grid":
        from orchestrator.grid.json_schema import grid_schema_text

        sys.stdout.write(grid_schema_text())
        return 0
    if args.of == "results":
        _print_columns()
    else:
        _print_precisions()
    return 0


def _print_precisions() -> None:
    from workloads.precision import table

    for row in table():
        unsupported = "" if row.supported else "unsupported: "
        print(f"{row.precision:<5}  {row.device:<5} {unsupported}{row.text}")


def _print_columns() -> None:
    from orchestrator.results.schema import SCHEMA_VERSION, schema

    headings = ("column", "type", "unit", "meaning")
    rows = [headings]
    for column in schema():
        metadata = {k.decode(): v.decode() for k, v in (column.metadata or {}).items()}
        kind = str(column.type)
        kind = kind if len(kind) <= 28 else kind.partition("<")[0] + "<…>"
        rows.append((column.name, kind, metadata.get("unit", ""), metadata.get("description", "")))
    widths = [max(len(row[index]) for row in rows) for index in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        print("  ".join([*cells, row[3]]).rstrip())
    print(f"\nSchema version {SCHEMA_VERSION}; docs/schema.md has the nested types.")
