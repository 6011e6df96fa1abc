"""``nightgrid status``: how a submitted job, or a run in a results directory, stands."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.host import output
from orchestrator.results.directory import default_results_dir

if TYPE_CHECKING:
    from orchestrator.on_ray.submission import JobInfo
    from orchestrator.results.store import Store

EPILOG = """\
examples:
  nightgrid status                                     the newest run here
  nightgrid status --address http://head:8265          every job submitted there

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
    parser.add_argument(
        "--json", action="store_true", help="one JSON object; without ID, jobs as an array"
    )


def run(args: argparse.Namespace) -> int:
    """Show a job, the jobs, or a run.

    Raises:
        StoreError: there is no such run.
        SubmitError: there is no such job, or no cluster to ask.
    """
    from orchestrator.results.finding import find_run

    if args.address:
        from orchestrator.on_ray.submission import JobServer

        server = JobServer(args.address)
        jobs = [server.job(args.id)] if args.id else server.jobs()
        if args.json:
            told = [dataclasses.asdict(job) for job in jobs]
            output.say_json(told[0] if args.id else told, indent=1)
            return 0
        if not jobs:
            output.say(f"no Nightgrid job at {server.address}")
        for job in jobs:
            output.say(job_lines(job, details=bool(args.id)))
        return 0
    store = find_run(args.id, args.results)
    if args.json:
        output.say_json(run_json(store), indent=1)
    else:
        output.say(run_lines(store))
    return 0


def job_lines(job: JobInfo, *, details: bool) -> str:
    """A job in one line, or with its command and times."""
    line = f"{job.submission_id}  {job.status}"
    if job.started_at is not None:
        from orchestrator.watching.live_text import duration

        line += f"  for {duration((job.ended_at or time.time()) - job.started_at)}"
    if not details:
        return line
    from orchestrator.watching.notify import concealed

    lines = [line, f"  {concealed(job.entrypoint)}"]
    if job.exit_code is not None:
        lines.append(f"  exit code {job.exit_code}")
    if job.message:
        lines.append(f"  {job.message.strip().splitlines()[-1]}")
    return "\n".join(lines)


def run_json(store: Store) -> dict[str, object]:
    """The fields of ``RunStatus``, or None for all of them where no driver wrote any."""
    from orchestrator.report import read_status

    status = read_status(store)
    return {
        "run": store.run,
        "rows": str(store.tables_path.resolve()),
        "final_rows": final_rows(store),
        "age_s": None if status is None else time.time() - status.at,
        "status": None if status is None else dataclasses.asdict(status),
    }


def final_rows(store: Store) -> int:
    """Count the rows that are the last of their job in an invocation."""
    return sum(1 for row in store.history() if row.final)


def run_lines(store: Store) -> str:
    """The run's state: its driver's last status, else the number of rows."""
    from orchestrator.report import read_status
    from orchestrator.watching.live_text import duration, summary_line

    status = read_status(store)
    if status is None:
        return f"{store.run}: {final_rows(store)} final rows, no status of a driver"
    lines = [f"{store.run}: {summary_line(status)}"]
    age = time.time() - status.at
    if status.driver_died:
        lines.append(f"  last heard of {duration(age)} ago")
    elif not status.finished:
        silent = abs(age) > 60  # from the future: one of the two clocks was set
        when = f"{duration(age)} ago" if age > -60 else f"{duration(-age)} from now by this clock"
        lines.append(f"  as of {when}" + " (is its driver alive?)" * silent)
    for card in status.cards:
        if card.job:
            lines.append(f"  {card.card}  {card.phase} {duration(card.phase_age_s)}  {card.job}")
    lines += [f"  SLOW card {slow}" for slow in status.slow_cards]
    lines.append(f"  rows: {store.tables_path.resolve()}")
    return "\n".join(lines)
