"""``nightgrid status``: how a submitted job, or a run in a results directory, stands."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.results.directory import default_results_dir

if TYPE_CHECKING:
    from orchestrator.on_ray.submission import JobInfo

EPILOG = """\
with --address    ID is a submitted job; without ID, the jobs there are listed
without           ID is a run in the results directory; without ID, the newest run
exit codes: 0 shown; 4 no such run; 5 no such job, or the cluster is not reachable
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid status`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("id", nargs="?", metavar="ID", help="submission id, or name of a run")
    parser.add_argument("--address", metavar="URL", help="the cluster's dashboard")
    parser.add_argument(
        "--results",
        metavar="DIR",
        type=Path,
        default=default_results_dir(),
        help="results directory (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Show a job, the jobs, or a run."""
    if args.address:
        from orchestrator.on_ray.submission import JobServer

        server = JobServer(args.address)
        jobs = [server.job(args.id)] if args.id else server.jobs()
        if not jobs:
            print(f"no Nightgrid job at {server.address}")
        for job in jobs:
            print(job_lines(job, details=bool(args.id)))
        return 0
    print(run_lines(args.results, args.id))
    return 0


def job_lines(job: JobInfo, *, details: bool) -> str:
    """A job in one line, or with its command and times."""
    line = f"{job.submission_id}  {job.status}"
    if job.started_at is not None:
        from orchestrator.live import duration

        line += f"  for {duration((job.ended_at or time.time()) - job.started_at)}"
    if not details:
        return line
    lines = [line, f"  {job.entrypoint}"]
    if job.exit_code is not None:
        lines.append(f"  exit code {job.exit_code}")
    if job.message:
        lines.append(f"  {job.message.strip().splitlines()[-1]}")
    return "\n".join(lines)


def run_lines(results: Path, name: str | None) -> str:
    """How a run stands: what its driver wrote last, else how many rows there are.

    Raises:
        StoreError: there is no such run.
    """
    from orchestrator.errors import StoreError
    from orchestrator.live import duration, summary_line
    from orchestrator.results.store import Store, runs
    from orchestrator.run_status import RunStatus

    known = runs(results)
    if name is None and not known:
        raise StoreError(f"no run in {results}; `nightgrid run GRID` makes one")
    store = Store.existing(results, name or known[0])
    try:
        status = RunStatus.from_json((store.path / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        rows = sum(1 for row in store.history() if row.final)
        return f"{store.run}: {rows} final rows, no status of a driver"
    lines = [f"{store.run}: {summary_line(status)}"]
    age = time.time() - status.at
    if not status.finished:
        lines.append(f"  as of {duration(age)} ago" + (" (is its driver alive?)" * (age > 60)))
    for card in status.cards:
        if card.job:
            lines.append(f"  {card.card}  {card.phase} {duration(card.phase_age_s)}  {card.job}")
    lines.append(f"  rows: {store.tables_path.resolve()}")
    return "\n".join(lines)
