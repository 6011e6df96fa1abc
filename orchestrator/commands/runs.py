"""``nightgrid runs``: every run of a results directory, here or on a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING

from orchestrator.commands.options import add_place_arguments, results_here
from orchestrator.host import output
from orchestrator.results.finding import MOST_LISTED

if TYPE_CHECKING:
    from orchestrator.watching.run_list import RunEntry

EPILOG = """\
examples:
  nightgrid runs                                       the newest runs here
  nightgrid runs --address http://127.0.0.1:8265       those on a cluster's head node

states: STARTING (sent, and not begun yet), WAITING for cards that others have, RUNNING, PAUSED (no
room for rows), STOPPING, STOPPED, FINISHED, DIED (its driver is gone; the same command goes on)
exit codes: 0; 4 there are no runs; 5 the cluster is not reachable
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid runs`."""
    add_place_arguments(parser)
    parser.add_argument(
        "--last", metavar="N", type=int, default=MOST_LISTED, help="so many (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="an array on standard output")


def run(args: argparse.Namespace) -> int:
    """List the runs."""
    from orchestrator.watching.run_list import entry_lines, run_entries

    entries = _there(args) if args.address else run_entries(results_here(args), args.last)
    if args.json:
        output.say_json([dataclasses.asdict(each) for each in entries])
    else:
        output.say("\n".join(entry_lines(entries, time.time())))
    return 0


def _there(args: argparse.Namespace) -> list[RunEntry]:
    """The runs of a cluster's head, and those that were sent there and have not begun."""
    from orchestrator.core.errors import SubmitError
    from orchestrator.on_ray.jobs import JobServer, ask_json, directory_there
    from orchestrator.watching.run_list import entry_of, with_sent

    server = JobServer(args.address)
    place = directory_there(args.results, None)
    jobs = [job for job in server.jobs() if directory_there(None, job) == place]
    try:
        found = ask_json(server, ["runs", "--last", str(args.last)], args.results)
    except SubmitError:
        if not any(job.run and not job.over for job in jobs):
            raise
        found = []  # the first run of the cluster has made no directory yet
    return with_sent([entry_of(each) for each in found], jobs)
