"""``nightgrid status``: the state of a run or of a submitted job, from here or a workstation."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING

from orchestrator.commands.options import add_place_arguments, results_here
from orchestrator.host import output

if TYPE_CHECKING:
    from orchestrator.on_ray.jobs import JobInfo, JobServer
    from orchestrator.results.store import Store

EPILOG = """\
examples:
  nightgrid status                                     the newest run here
  nightgrid status --address http://head:8265          every job submitted there
  nightgrid status smoke --address http://head:8265    that run's progress, time left, its cards

with --address    ID is a submitted job or a run there; without ID, the jobs there are listed
without           ID is a run in the results directory; without ID, the newest run
exit codes: 0 shown; 4 no such run; 5 no such job, or the cluster is not reachable
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid status`."""
    parser.add_argument("id", nargs="?", metavar="ID", help="submission id, or name of a run")
    add_place_arguments(parser)
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
        from orchestrator.on_ray.jobs import JobServer

        server = JobServer(args.address)
        if args.id:
            return _one_there(args, server)
        jobs = server.jobs()
        if args.json:
            output.say_json([dataclasses.asdict(job) for job in jobs], indent=1)
            return 0
        if not jobs:
            output.say(f"no Nightgrid job at {server.address}")
        for job in jobs:
            output.say(job_lines(job, details=False))
        return 0
    store = find_run(args.id, results_here(args))
    if args.json:
        output.say_json(run_json(store), indent=1)
    else:
        output.say(run_lines(store))
    return 0


def _one_there(args: argparse.Namespace, server: JobServer) -> int:
    """Show a job, and the run that it drives; or a run that was started on the cluster itself."""
    from orchestrator.core.errors import SubmitError
    from orchestrator.on_ray.jobs import ask_json, ask_there

    job = server.sent(args.id)
    name = job.run if job is not None and job.run else args.id
    if args.json:
        told = {} if job is None else dataclasses.asdict(job)
        try:
            told["run_status"] = ask_json(server, ["status", name], args.results, job)
        except SubmitError:
            if job is None:
                raise
            told["run_status"] = None
        output.say_json(told, indent=1)
        return 0
    if job is not None:
        output.say(job_lines(job, details=True))
    printed = ask_there(server, ["status", name], args.results, job).strip()
    if job is None and printed.startswith("nightgrid status:"):  # it was refused there
        raise SubmitError(f"no job and no run '{args.id}' at {server.address}:\n{printed}")
    output.say(printed)
    return 0


def job_lines(job: JobInfo, *, details: bool) -> str:
    """A job in one line, or with its command and times."""
    line = f"{job.submission_id}  {job.status}" + (f"  run {job.run}" if job.run else "")
    if job.started_at is not None:
        from orchestrator.watching.live_text import duration

        line += f"  for {duration((job.ended_at or time.time()) - job.started_at)}"
    if not details:
        return line
    from orchestrator.watching.notify import concealed

    lines = [line, f"  {concealed(job.entrypoint)}"]
    if job.exit_code is not None:
        lines.append(f"  exit code {job.exit_code}")
    if job.message and job.status != "RUNNING":  # of such a job Ray says just that
        lines.append(f"  {job.message.strip().splitlines()[-1]}")
    return "\n".join(lines)


def run_json(store: Store) -> dict[str, object]:
    """The fields of ``RunStatus``, or None for all of them where no driver wrote any."""
    from orchestrator.report.run_report import read_status

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
    from orchestrator.report.run_report import read_status
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
