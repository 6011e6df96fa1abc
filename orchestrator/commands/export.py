"""``nightgrid export --to datasets|mlflow``: results for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestrator.commands.options import add_results_argument, add_runs_argument
from orchestrator.host import output

TARGETS = ("datasets", "mlflow")

EPILOG = """\
examples:
  nightgrid export rows --to datasets
  nightgrid export http://127.0.0.1:5000 --to mlflow --run smoke

datasets: a directory for Hugging Face `datasets`, with the configurations rows, samples and items:
  from datasets import load_dataset
  load_dataset("DEST", "rows", split="train")

mlflow: the tracking server at the address DEST, such as http://127.0.0.1:5000; one experiment a
run, one MLflow run a job. What is there already is left alone, so it can be done every morning.

exit codes: 0 written; 4 no runs, a run cannot be read, or DEST cannot be written;
7 mlflow is not installed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid export`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "destination", metavar="DEST", help="datasets: a new directory; mlflow: a tracking URI"
    )
    parser.add_argument("--to", choices=TARGETS, required=True, help="what to write")
    add_results_argument(parser)
    add_runs_argument(parser)
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the export.

    Raises:
        StoreError: there are no runs, one cannot be read, or the destination cannot be written.
        ExtraMissing: mlflow is not installed.
    """
    if args.to == "mlflow":
        from orchestrator.report.export_mlflow import export_mlflow

        destination = args.destination
        written = export_mlflow(args.results, destination, args.run_names)
        told = ", ".join(f"{count:,} new jobs of {name}" for name, count in written.items())
    else:
        from orchestrator.report.export_datasets import export_datasets

        directory = Path(args.destination)
        written = export_datasets(args.results, directory, args.run_names)
        destination = str(directory.resolve())
        told = ", ".join(f"{count:,} {name}" for name, count in written.items())
    if args.json:
        output.say_json({"destination": destination, "written": written})
    else:
        output.say(f"{destination}: {told}")
    return 0
