"""``nightgrid export --to datasets DIR``: results for other programs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from orchestrator.results_dir import default_results_dir

TARGETS = ("datasets",)

EPILOG = """\
datasets: a directory for Hugging Face `datasets`, with the configurations rows, samples and items:
  from datasets import load_dataset
  load_dataset("DIR", "rows", split="train")

exit codes: 0 written; 4 no runs, a run cannot be read, or DIR cannot be written
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid export`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("directory", metavar="DIR", type=Path, help="a new directory")
    parser.add_argument("--to", choices=TARGETS, required=True, help="what to write")
    parser.add_argument(
        "--results",
        metavar="DIR",
        type=Path,
        default=default_results_dir(),
        help="where runs lie (default: $NIGHTGRID_RESULTS, else ./results)",
    )
    parser.add_argument(
        "--run",
        metavar="NAME",
        action="append",
        dest="run_names",
        default=[],
        help="only this run; may be repeated (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the export.

    Raises:
        StoreError: there are no runs, one cannot be read, or the directory cannot be written.
    """
    from orchestrator.export_datasets import export_datasets

    written = export_datasets(args.results, args.directory, args.run_names)
    if args.json:
        print(json.dumps({"directory": str(args.directory.resolve()), "rows": written}))
        return 0
    told = ", ".join(f"{count:,} {name}" for name, count in written.items())
    print(f"{args.directory.resolve()}: {told}")
    return 0
