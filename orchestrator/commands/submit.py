"""``nightgrid submit GRID --address http://HEAD:8265``: send a grid to a cluster and return.

The grid is checked here first. The program, the grid and the files that the grid names are uploaded
and listed, and the cluster runs the same command that one would type there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestrator.commands.options import (
    add_deadline_arguments,
    add_notify_argument,
    add_set_argument,
)
from orchestrator.grid.shipped import found
from orchestrator.host import output

EPILOG = """\
What follows -- goes to `nightgrid run` on the cluster, for example
  nightgrid submit grids/smoke.yaml --address http://head:8265 -- --retry-failed

With --submission-id the same command can be repeated safely: it finds the job that is there.
exit codes: 0 sent, or there already; 2 the grid is refused; 5 the cluster is not reachable or
refuses.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid submit`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.usage = "%(prog)s GRID --address URL [options] [-- ARGUMENTS OF nightgrid run]"
    parser.add_argument("grid", metavar="GRID", type=found, help="grid file (YAML)")
    parser.add_argument(
        "--address",
        metavar="URL",
        help="the cluster's dashboard, http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS)",
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="where rows go, on the node that drives the run "
        "(default: NIGHTGRID_RESULTS, else ~/nightgrid-results there)",
    )
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="default: the grid's name")
    parser.add_argument(
        "--submission-id", metavar="ID", help="the job's id; repeating it starts no second job"
    )
    parser.add_argument(
        "--working-dir",
        metavar="DIR",
        type=Path,
        default=Path(),
        help="where the grid and the files that it names lie (default: this directory)",
    )
    parser.add_argument(
        "--include",
        metavar="PATH",
        action="append",
        default=[],
        help="upload this too: a file or a directory in the working directory; a file named as "
        "secrets are (.env, *.pem, …) goes only if it is named here; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    add_set_argument(parser)
    add_deadline_arguments(parser)
    add_notify_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Check, send, and say how to find the job again."""
    from orchestrator.grid.reader import load_grid
    from orchestrator.on_ray.submission import JobServer, Submission, new_submission_id
    from orchestrator.watching.notify import concealed, is_address

    if any(map(is_address, args.notify)):
        output.say_aside(
            "note: whoever may list the cluster's jobs can read the address after --notify; "
            "--notify @FILE, a file on the node that drives the run, keeps it to yourself"
        )
    grid = load_grid(args.grid, overrides=args.overrides)
    name = args.run_name or grid.name
    submission = Submission(
        grid=args.grid,
        working_dir=args.working_dir,
        run=name,
        submission_id=args.submission_id or new_submission_id(name),
        results=args.results,
        arguments=(
            *(f"--set={text}" for text in args.overrides),
            *args.handed_on,
            *deadline_words(args),
            *(word for hook in args.notify for word in ("--notify", hook)),
        ),
        jobs=grid.jobs(),
        include=tuple(args.include),
    )
    entrypoint = submission.entrypoint  # refused before the cluster is asked
    upload = submission.upload()
    output.say_aside(upload.text())
    server = JobServer(args.address)
    sent = server.submit(submission)
    if args.json:
        told = {
            "submission_id": submission.submission_id,
            "sent": sent,
            "address": server.address,
            "run": name,
            "entrypoint": entrypoint,
            "uploaded": {"bytes": upload.size_bytes, "files": sorted(upload.files)},
        }
        output.say_json(told)
        return 0
    output.say(submission.submission_id)
    output.say("  " + ("sent" if sent else "is there already") + f": {concealed(entrypoint)}")
    where = f"{submission.submission_id} --address {server.address}"
    output.say(f"  nightgrid status {where}")
    output.say(f"  nightgrid logs {where} --follow")
    return 0


def deadline_words(args: argparse.Namespace) -> list[str]:
    """The deadline as the cluster understands it: 08:00 here may be another time there. A budget
    counts from the start of the run, not of the submission."""
    if args.deadline is not None:
        return ["--deadline", args.deadline.isoformat(timespec="minutes")]
    return [] if args.budget is None else ["--budget", f"{args.budget:.0f}s"]
