"""``nightgrid stop RUN``: end a run in an orderly way, from here or from a workstation."""

from __future__ import annotations

import argparse

from orchestrator.commands.options import add_place_arguments, results_here
from orchestrator.host import output

EPILOG = """\
examples:
  nightgrid stop smoke                                   a run here, or on storage seen from here
  nightgrid stop smoke --address http://127.0.0.1:8265   one on a cluster, by name or job id

What runs may end, nothing more is started, every job gets its row and the report is written. The
same again (or --now) stops what runs, too. The same `nightgrid run` or `submit` goes on later.
exit codes: 0 asked; 4 no such run, or no driver works on it; 5 no such job, or not reachable
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid stop`."""
    parser.add_argument("id", metavar="RUN", help="name of a run, or id of a submitted job")
    add_place_arguments(parser)
    parser.add_argument("--now", action="store_true", help="do not wait for jobs that run")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Ask the run's driver to end it."""
    run, count = _asked_there(args) if args.address else _asked_here(args)
    if args.json:
        output.say_json({"run": run, "requests": count})
    elif count > 1:
        output.say(f"{run}: asked to stop at once; every job gets its row")
    else:
        output.say(
            f"{run}: asked to stop; what runs may end, nothing more is started. The same again "
            "stops what runs, too"
        )
    return 0


def _asked_here(args: argparse.Namespace) -> tuple[str, int]:
    from orchestrator.core.errors import StoreError
    from orchestrator.results.finding import find_run
    from orchestrator.results.lock import held
    from orchestrator.results.stop_file import request_stop

    store = find_run(args.id, results_here(args))
    if not held(store.path):
        raise StoreError(f"no driver works on run {store.run!r} in {store.path.parent}")
    return store.run, request_stop(store, at_once=args.now)


def _asked_there(args: argparse.Namespace) -> tuple[str, int]:
    from orchestrator.core.errors import SubmitError
    from orchestrator.on_ray.jobs import JobServer, ask_json

    server = JobServer(args.address)
    job = server.sent(args.id)
    name = job.run if job is not None and job.run else args.id
    command = ["stop", name, *(["--now"] if args.now else [])]
    try:
        told = ask_json(server, command, args.results, job)
        return str(told["run"]), int(told["requests"])
    except SubmitError:
        if job is None or job.over:
            raise
        server.stop(job.submission_id)  # its driver has not come to its run yet
        return name, 2
