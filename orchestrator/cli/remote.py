"""Commands for a run elsewhere: ``submit``, ``fetch``, ``logs`` and ``stop``."""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestrator.cli import options as shared
from orchestrator.core.errors import StoreError, SubmitError
from orchestrator.driver.plan import note_packages_at, refuse_files, refuse_sent_by_another
from orchestrator.grid import grid_path
from orchestrator.grid.parser import Grid, load_grid
from orchestrator.on_ray.jobs import (
    JobServer,
    Submission,
    directory_there,
    new_submission_id,
    owner_of,
)
from orchestrator.on_ray.run_queue import RESULTS
from orchestrator.on_ray.run_status import RunCopy
from orchestrator.store.files import is_address, request_stop
from orchestrator.store.lock import is_held
from orchestrator.store.reader import damage_of
from orchestrator.store.remote import copy_directory, fetch_from, shown_address
from orchestrator.store.store import find_run
from orchestrator.util import output
from orchestrator.util.format import plural
from orchestrator.watch.notify import concealed
from orchestrator.watch.notify import is_address as is_hook_address


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid submit grids/smoke.yaml --address http://head:8265
      nightgrid submit grids/smoke.yaml grids/techniques.yaml --address http://head:8265    a queue
      nightgrid submit grids/smoke.yaml --priority 5 --address http://head:8265

    A run on a busy cluster is WAITING until the runs before it have ended: those of a higher
    priority, then those that were sent earlier. A run that has cards is never interrupted for
    another.
    What follows -- goes to `nightgrid run` on the cluster, for example
      nightgrid submit grids/smoke.yaml --address http://head:8265 -- --retry-failed

    With --submission-id the same command can be repeated safely: it finds the job that is there.
    exit codes: 0 sent, or there already; 2 the grid is refused; 5 the cluster is not reachable or
    refuses.
    """
    parser.usage = "%(prog)s GRID [GRID …] --address URL [options] [-- ARGUMENTS OF nightgrid run]"
    parser.add_argument(
        "grids",
        metavar="GRID",
        type=grid_path,
        nargs="+",
        help="grid file (YAML); several: one by one",
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
    shared.add(parser, "--priority", "--wait-for-cards")
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
    shared.add(parser, "--json", "--set", "--notify")
    shared.add_deadline_arguments(parser)


def run_submit(args: argparse.Namespace) -> int:
    """Check, send, and say how to find the jobs again."""
    if len(args.grids) > 1 and (args.run_name or args.submission_id):
        args.refuse("--run and --submission-id name one run; send grids one by one to name each")
    if any(map(is_hook_address, args.notify)):
        output.say_aside(
            "note: whoever may list the cluster's jobs can read the address after --notify; "
            "--notify @FILE, a file on the node that drives the run, keeps it to yourself"
        )
    loaded = [load_grid(grid, overrides=args.overrides, elsewhere=True) for grid in args.grids]
    submissions = [_submission(args, *pair) for pair in zip(args.grids, loaded, strict=True)]
    names = [submission.run for submission in submissions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        args.refuse(f"two grids make the run {twice[0]}; send them one by one with --run NAME")
    uploads = [one.upload() for one in submissions]  # refused before contacting the cluster
    server = JobServer(args.address)
    jobs = server.jobs()
    for grid, submission in zip(loaded, submissions, strict=True):
        if "--resume" not in submission.arguments:
            owner = owner_of(jobs, submission.run, submission.metadata[RESULTS])
            refuse_sent_by_another(grid, submission.run, owner)
        refuse_files(server.address, grid, grid.jobs())
        note_packages_at(server.address, grid)
    for upload in uploads:
        output.say_aside(upload.text())
    sent_jobs = []
    for submission, upload in zip(submissions, uploads, strict=True):
        sent = server.submit(submission)
        sent_jobs.append(
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
        output.say_json(sent_jobs[0] if len(sent_jobs) == 1 else sent_jobs)
    return 0


def _submission(args: argparse.Namespace, path: Path, grid: Grid) -> Submission:
    lasts = is_address(grid.results) or grid.results.startswith(("/", "~"))
    if not args.results and grid.results and not lasts:
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
            *([f"--wait-for-cards={args.wait_for_cards:g}"] if args.wait_for_cards else []),
            *deadline_words(args),
            *(word for hook in args.notify for word in ("--notify", hook)),
        ),
        jobs=grid.jobs(),
        priority=args.priority,
        include=tuple(args.include),
    )
    _ = submission.entrypoint  # refused if the grid is outside of what is uploaded
    return submission


def deadline_words(args: argparse.Namespace) -> list[str]:
    """Deadline with its time zone, which may differ there; or a budget, from the run's start."""
    if args.deadline is not None:
        return ["--deadline", args.deadline.isoformat()]
    return [] if args.budget is None else ["--budget", f"{args.budget:.0f}s"]


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid fetch smoke --address http://127.0.0.1:8265    then: nightgrid report smoke
      nightgrid fetch smoke --address http://127.0.0.1:8265 --as smoke-monday
      nightgrid fetch smoke --address s3://bucket/nights       a copy that `--results s3://…` made

    It may be repeated while the run goes on, and interrupted: what has come is whole, and the next
    one brings the rest. The head's dashboard serves the files; no further port is needed.
    exit codes: 0 all there; 4 no such run, or this machine has one of this name or has gone on with
    the copy; 5 not reachable, or not all came
    """
    parser.add_argument("id", metavar="RUN", help="name of a run, or id of a submitted job")
    parser.add_argument(
        "--address",
        metavar="URL",
        help="the cluster's dashboard, http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS), or the "
        "address of a copy, s3://BUCKET/PREFIX",
    )
    parser.add_argument(
        "--from", dest="there", metavar="DIR", help="where runs lie there (default: as it was sent)"
    )
    parser.add_argument("--as", dest="name", metavar="NAME", help="here (default: its own name)")
    shared.add_results_argument(parser)
    shared.add(parser, "--json")


def run_fetch(args: argparse.Namespace) -> int:
    """Bring what is not here yet."""
    if args.address and is_address(args.address):
        name, source = args.name or args.id, shown_address(args.address)
        received = fetch_from(
            args.address, args.id, lambda run_id: copy_directory(args.results, name, source, run_id)
        )
    else:
        copy = RunCopy(args.address, args.id, args.results, there=args.there, name=args.name)
        name, received = copy.name, copy.copy()
    path = args.results / name
    rows = [file for file in received if file.endswith(".parquet")]
    damaged = [file for file in rows if damage_of(Path(file).name, (path / file).read_bytes())]
    report: dict[str, object] = {"run": name, "path": str(path), "received": received}
    report |= {"damaged": damaged, "finished": True}
    text = f"{name}: {plural(len(received), 'file')} came, all is in {path}"
    return shared.print_answer(args, report, text)


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    """example:
      nightgrid logs smoke --follow --address http://head:8265     a run's newest job, or a job's id

    --follow prints from the start and goes on until the job is over, over broken connections too.
    Ctrl-C ends the printing, not the job.
    exit codes: 0; with --follow 1 if the job did not succeed; 5 no such job, or not reachable
    """
    parser.add_argument("id", metavar="ID", help="name of a run, or submission id")
    parser.add_argument("--address", metavar="URL", help="the cluster's dashboard")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job is over")


def run_logs(args: argparse.Namespace) -> int:
    """Print the log, once or as it grows."""
    server = JobServer(args.address)
    sent = server.sent(args.id)
    name = args.id if sent is None else sent.submission_id
    if not args.follow:
        output.say(server.logs(name), end="")
        return 0
    job = server.follow(name, lambda text: output.say(text, end=""))
    if job.status != "SUCCEEDED":
        output.say_aside(f"job {job.submission_id} {job.status}: {job.message}")
        return 1
    return 0


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid stop smoke                                  a run here, or on storage seen from here
      nightgrid stop smoke --address http://127.0.0.1:8265  one on a cluster, by name or job id

    What runs may end, nothing more is started, every job gets its row and the report is written.
    The same again (or --now) stops what runs, too. The same `nightgrid run` or `submit` goes on
    later.
    exit codes: 0 asked; 4 no such run, or no driver works on it; 5 no such job, or not reachable
    """
    parser.add_argument("id", metavar="RUN", help="name of a run, or id of a submitted job")
    shared.add_place_arguments(parser)
    parser.add_argument("--now", action="store_true", help="do not wait for jobs that run")
    shared.add(parser, "--json")


def run_stop(args: argparse.Namespace) -> int:
    """Ask the run's driver to end it."""
    if args.address:
        run, count = _request_there(args)
    else:
        store = find_run(args.id, shared.results_here(args))
        if not is_held(store.path):
            raise StoreError(f"no driver works on run {store.run!r} in {store.path.parent}")
        run, count = store.run, request_stop(store.path, at_once=args.now)
    text = f"{run}: asked to stop at once; every job gets its row"
    if count == 1:
        text = (
            f"{run}: asked to stop; what runs may end, nothing more is started. The same again "
            "stops what runs, too"
        )
    return shared.print_answer(args, {"run": run, "requests": count}, text)


def _request_there(args: argparse.Namespace) -> tuple[str, int]:
    server = JobServer(args.address)
    job = server.sent(args.id)
    name = job.run if job is not None and job.run else args.id
    command = ["stop", name, *(["--now"] if args.now else [])]
    try:
        answer = server.answer(command, directory_there(args.results, job))
        return str(answer["run"]), int(answer["requests"])
    except SubmitError:
        if job is None or job.over:
            raise
        server.stop(job.submission_id)  # its driver has not come to its run yet
        return name, 2
