"""``nightgrid logs ID --address http://HEAD:8265 [--follow]``: what a submitted job prints."""

from __future__ import annotations

import argparse

from orchestrator.host import output

EPILOG = """\
example:
  nightgrid logs smoke --follow --address http://head:8265     a run's newest job, or a job's id

--follow prints from the start and goes on until the job is over, over broken connections too.
Ctrl-C ends the printing, not the job.
exit codes: 0; with --follow 1 if the job did not succeed; 5 no such job, or not reachable
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid logs`."""
    parser.add_argument("id", metavar="ID", help="name of a run, or submission id")
    parser.add_argument("--address", metavar="URL", help="the cluster's dashboard")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job is over")


def run(args: argparse.Namespace) -> int:
    """Print the log, once or as it grows."""
    from orchestrator.on_ray.jobs import JobServer, print_chunk

    server = JobServer(args.address)
    sent = server.sent(args.id)
    name = args.id if sent is None else sent.submission_id
    if not args.follow:
        print_chunk(server.logs(name))
        return 0
    job = server.follow(name, print_chunk)
    if job.status != "SUCCEEDED":
        output.say_aside(f"job {job.submission_id} {job.status}: {job.message}")
        return 1
    return 0
