"""``nightgrid submit GRID … --address http://HEAD:8265``: send grids to a cluster and return.

Each grid is a Ray job; on a busy cluster they wait for each other, in the order in which they were
sent. A grid is checked here first. The program, the grid and the files that the grid names are
uploaded and listed, and the cluster runs the same command that one would type there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.options import (
    add_deadline_arguments,
    add_notify_argument,
    add_priority_argument,
    add_set_argument,
)
from orchestrator.grid.yaml import found
from orchestrator.host import output
from orchestrator.results.directory import is_address

if TYPE_CHECKING:
    from orchestrator.on_ray.jobs import Submission

EPILOG = """\
examples:
  nightgrid submit grids/smoke.yaml --address http://head:8265
  nightgrid submit grids/smoke.yaml grids/techniques.yaml --address http://head:8265    a queue
  nightgrid submit grids/smoke.yaml --priority 5 --address http://head:8265

A run on a busy cluster is WAITING until the runs before it have ended: those of a higher priority,
then those that were sent earlier. A run that has cards is never interrupted for another.
What follows -- goes to `nightgrid run` on the cluster, for example
  nightgrid submit grids/smoke.yaml --address http://head:8265 -- --retry-failed

With --submission-id the same command can be repeated safely: it finds the job that is there.
exit codes: 0 sent, or there already; 2 the grid is refused; 5 the cluster is not reachable or
refuses.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid submit`."""
    parser.usage = "%(prog)s GRID [GRID …] --address URL [options] [-- ARGUMENTS OF nightgrid run]"
    parser.add_argument(
        "grids", metavar="GRID", type=found, nargs="+", help="grid file (YAML); several: one by one"
    )
    parser.add_argument(
        "--address",
        metavar="URL",
        help="the cluster's dashboard, http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS)",
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="where rows go, on the node that drives the run "
        "(default: the grid's `results:`, else NIGHTGRID_RESULTS, else ~/nightgrid-results there)",
    )
    parser.add_argument(
        "--run", dest="run_name", metavar="NAME", help="of one grid (default: its own name)"
    )
    parser.add_argument(
        "--submission-id",
        metavar="ID",
        help="the job's id, of one grid; repeating it starts no second job",
    )
    add_priority_argument(parser)
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
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object; of several grids an array",
    )
    add_set_argument(parser)
    add_deadline_arguments(parser)
    add_notify_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Check, send, and say how to find the jobs again."""
    from orchestrator.on_ray.jobs import JobServer
    from orchestrator.watching.notify import concealed
    from orchestrator.watching.notify import is_address as is_hook_address

    if len(args.grids) > 1 and (args.run_name or args.submission_id):
        args.refuse("--run and --submission-id name one run; send grids one by one to name each")
    if any(map(is_hook_address, args.notify)):
        output.say_aside(
            "note: whoever may list the cluster's jobs can read the address after --notify; "
            "--notify @FILE, a file on the node that drives the run, keeps it to yourself"
        )
    submissions = [_submission(args, grid) for grid in args.grids]
    names = [each.run for each in submissions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        args.refuse(f"two grids make the run {twice[0]}; send them one by one with --run NAME")
    uploads = [each.upload() for each in submissions]  # refused before the cluster is asked
    server = JobServer(args.address)
    for upload in uploads:
        output.say_aside(upload.text())
    told = []
    for submission, upload in zip(submissions, uploads, strict=True):
        sent = server.submit(submission)
        told.append(
            {
                "submission_id": submission.submission_id,
                "sent": sent,
                "address": server.address,
                "run": submission.run,
                "entrypoint": submission.entrypoint,
                "uploaded": {"bytes": upload.size_bytes, "files": sorted(upload.files)},
            }
        )
        if args.json:
            continue
        output.say(submission.submission_id)
        how = "sent" if sent else "is there already"
        output.say(f"  {how}: {concealed(submission.entrypoint)}")
        where = f"--address {server.address}"
        output.say(f"  nightgrid status {submission.run} {where}")
        output.say(f"  nightgrid logs {submission.submission_id} {where} --follow")
    if args.json:
        output.say_json(told[0] if len(told) == 1 else told)
    return 0


def _submission(args: argparse.Namespace, path: Path) -> Submission:
    from orchestrator.core.errors import SubmitError
    from orchestrator.grid.parser import load_grid
    from orchestrator.on_ray.jobs import Submission, new_submission_id

    grid = load_grid(path, overrides=args.overrides)
    if not args.results and grid.results and not _lasts(grid.results):
        raise SubmitError(
            f"{path}: `results: {grid.results}` lies in the directory of a Ray job, which is "
            "thrown away with the job: write an absolute path or an address, or give --results"
        )
    name = args.run_name or grid.name
    submission = Submission(
        grid=path,
        working_dir=args.working_dir,
        run=name,
        submission_id=args.submission_id or new_submission_id(name),
        results=args.results or grid.results or None,
        arguments=(
            *(f"--set={text}" for text in args.overrides),
            *args.handed_on,
            *deadline_words(args),
            *(word for hook in args.notify for word in ("--notify", hook)),
        ),
        jobs=grid.jobs(),
        priority=args.priority,
        include=tuple(args.include),
    )
    _ = submission.entrypoint  # refused if the grid is outside of what is uploaded
    return submission


def _lasts(results: str) -> bool:
    return is_address(results) or results.startswith(("/", "~"))


def deadline_words(args: argparse.Namespace) -> list[str]:
    """The deadline as the cluster understands it: 08:00 here may be another time there. A budget
    counts from the start of the run, not of the submission."""
    if args.deadline is not None:
        return ["--deadline", args.deadline.isoformat(timespec="minutes")]
    return [] if args.budget is None else ["--budget", f"{args.budget:.0f}s"]
