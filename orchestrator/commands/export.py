"""``nightgrid export``: results for other programs, and an atlas for other sites."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.options import add_results_argument, add_runs_argument
from orchestrator.core.errors import StoreError
from orchestrator.host import output
from orchestrator.trackers import TRACKERS

if TYPE_CHECKING:
    from orchestrator.core.measurement import Measurement
    from orchestrator.report.atlas import Atlas
    from orchestrator.trackers.base import Tracker

EPILOG = """\
examples:
  nightgrid export rows --to datasets
  nightgrid export http://127.0.0.1:5000 --to mlflow --run smoke
  nightgrid export atlas.json --atlas grids/gaudi-atlas.yaml --merge theirs.json

datasets: a directory for Hugging Face `datasets`, with the configurations rows, samples and items:
  from datasets import load_dataset
  load_dataset("DEST", "rows", split="train")

mlflow: the tracking server or database DEST, http://127.0.0.1:5000 or sqlite:///mlflow.db; one
experiment a run, one MLflow run a job. wandb: the project DEST of Weights & Biases; its files lie
beside the rows. What is there already is left alone, so it can be done every morning.
`nightgrid run --log-to` does the same while rows come.

--atlas: one JSON file with every cell of the grid, and where it was run (by nobody, emulated by
the card's own libraries, on a card) with dates, by the rows of this results directory. Another site
merges it into its own with --merge; bundles can be merged in any order, and again.

exit codes: 0 written; 4 no runs, a run cannot be read, or DEST cannot be written or refuses rows,
which are named when the others are written;
7 mlflow or wandb is not installed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid export`."""
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
    add_results_argument(parser)
    add_runs_argument(parser)
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the export.

    Raises:
        StoreError: there are no runs, one cannot be read, or the destination cannot be written.
        ExtraMissing: the tracker's package is not installed.
        GridError: the atlas's grid is refused.
    """
    if args.merge and not args.atlas:
        raise StoreError("--merge belongs to --atlas")
    refused: list[str] = []
    if args.atlas:
        destination = args.destination
        written = _write_atlas(args)
        told = ", ".join(f"{count:,} cells by {status}" for status, count in written.items())
    elif args.to != "datasets":
        destination = args.destination
        written = dict(_track(TRACKERS[args.to], args, refused))
        told = ", ".join(f"{count:,} new jobs of {name}" for name, count in written.items())
    else:
        from orchestrator.report.export import export_datasets

        directory = Path(args.destination)
        written = export_datasets(args.results, directory, args.run_names)
        destination = str(directory.resolve())
        told = ", ".join(f"{count:,} {name}" for name, count in written.items())
    if args.json:
        output.say_json({"destination": destination, "written": written})
    else:
        output.say(f"{destination}: {told}")
    if refused:
        raise StoreError("; ".join(refused))
    return 0


def _track(
    tracker: Tracker, args: argparse.Namespace, refused: list[str]
) -> Iterator[tuple[str, int]]:
    """Write the newest final rows of each run to a tracker; by run, how many were new there. What
    it refuses is told in ``refused``."""
    from orchestrator.analysis.selection import newest_final
    from orchestrator.results.finding import existing_runs, find_run
    from orchestrator.runtime.backlog import write_rows

    destination = tracker.destination_of(args.destination)
    for name in args.run_names or sorted(existing_runs(args.results)):
        store = find_run(name, args.results)
        rows = newest_final(store.measurements(samples=False))
        done = write_rows(tracker, destination, name, store.path, rows)
        if done.told_of_refused:
            refused.append(f"{name}: of its rows {done.told_of_refused}")
        yield name, done.written


def _write_atlas(args: argparse.Namespace) -> dict[str, int]:
    """Write the bundle of a grid; the number of its cells by status."""
    from orchestrator.grid.parser import load_grid
    from orchestrator.report.atlas import atlas_of, merged, to_json

    grid = load_grid(args.atlas, check_data=False)
    rows = (row for run in _runs(args) for row in _rows(args.results, run))
    atlas = merged(atlas_of(grid.name, grid.jobs(), rows), *map(_bundle, args.merge))
    from orchestrator.results import disk

    path = Path(args.destination)
    aside = path.with_name(f"{path.name}.part")
    try:
        aside.write_text(to_json(atlas), encoding="utf-8")
        disk.rename(aside, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    return atlas.counts()


def _runs(args: argparse.Namespace) -> list[str]:
    """The runs to look at; there may be none, since an atlas of nothing is one, too."""
    from orchestrator.results.finding import existing_runs

    return list(args.run_names) or (existing_runs(args.results) if args.results.is_dir() else [])


def _rows(results: Path, run: str) -> Iterator[Measurement]:
    from orchestrator.results.store import Store

    yield from Store.existing(results, run).measurements()


def _bundle(path: Path) -> Atlas:
    from orchestrator.report.atlas import LARGEST_BYTES, from_json
    from workloads import files

    try:
        text = files.read_text(path, limit_bytes=LARGEST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"cannot read {path}: {reason}") from error
    return from_json(text, str(path))
