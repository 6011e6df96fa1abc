"""Commands that show runs: ``status``, ``runs`` and ``watch``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import logging
import math
import secrets
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.cli import options as shared
from orchestrator.core.errors import NightgridError, StoreError, SubmitError
from orchestrator.core.status import RunStatus
from orchestrator.on_ray.jobs import (
    HeadJobFailed,
    JobInfo,
    JobServer,
    NoAnswer,
    directory_there,
)
from orchestrator.on_ray.run_status import (
    RunCopy,
    ServedRun,
    serve_results,
    served_runs,
)
from orchestrator.report.run_report import read_status
from orchestrator.store import disk
from orchestrator.store.files import inside_ray_job
from orchestrator.store.store import MOST_LISTED, Store, find_run
from orchestrator.util import output
from orchestrator.util.format import duration
from orchestrator.watch.live import summary_line
from orchestrator.watch.notify import concealed
from orchestrator.watch.server import TOKEN, WatchServer, is_loopback
from orchestrator.watch.state import (
    RunEntry,
    RunFeed,
    entry_by_status,
    entry_lines,
    entry_of,
    run_entries,
    with_sent,
)
from workloads.base import DataMissing
from workloads.data.cache import cache_root
from workloads.util import files


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid status                                     the newest run here
      nightgrid status --address http://head:8265          every job submitted there
      nightgrid status smoke --address http://head:8265    that run's progress, time left, its cards

    with --address    ID is a submitted job or a run there; without ID, the jobs there are listed
    without           ID is a run in the results directory; without ID, the newest run
    exit codes: 0 shown; 4 no such run; 5 no such job, or the cluster is not reachable
    """
    parser.add_argument("id", nargs="?", metavar="ID", help="submission id, or name of a run")
    shared.add_place_arguments(parser)
    shared.add(parser, "--json")


#: Time for a submitted driver to report for the first time.
_START_S = 30.0


def run_status(args: argparse.Namespace) -> int:
    """Show a job, the jobs, or a run."""
    if args.address:
        return _one_there(args) if args.id else _jobs_there(args)
    serve_in_job(args)
    store = find_run(args.id, shared.results_here(args))
    rows, final_rows = str(store.tables_path.resolve()), _final_rows(store)
    report = _status_json(store.run, rows, final_rows, read_status(store))
    return shared.print_answer(args, report, run_lines(store), indent=1)


def serve_in_job(args: argparse.Namespace) -> None:
    """In a head job: link the results, so that the next question about them needs none."""
    if inside_ray_job():
        serve_results(shared.results_here(args))


def _server(address: str) -> JobServer:
    """The job server at an address; the error of one that is gone says what was last seen of it."""
    try:
        return JobServer(address)
    except NoAnswer as error:
        raise NoAnswer("\n".join([str(error), *_last_seen(address)])) from error


def _last_seen(address: str) -> list[str]:
    """Lines of the last answer of a cluster, and how to go on; empty if there is none."""
    with contextlib.suppress(OSError, ValueError, DataMissing):
        note = _note_of(address)
        return [
            f"Last seen from here {duration(time.time() - note.stat().st_mtime)} ago:",
            textwrap.indent(files.read_text(note), "  "),
            "What was measured is on the head's disk. Once a head runs there again, the same "
            "`nightgrid submit` measures only what is missing.",
        ]
    return []


def _note(address: str, lines: Sequence[str]) -> None:
    """Note what is printed of a cluster for when it is gone, best-effort."""
    with contextlib.suppress(OSError, ValueError, DataMissing, StoreError):
        note = _note_of(address)
        note.parent.mkdir(parents=True, exist_ok=True)
        disk.replace_file(note.parent, note.name, "\n".join(lines).encode())


def _note_of(address: str) -> Path:
    name = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    return cache_root() / "clusters" / f"{name}.txt"


def _jobs_there(args: argparse.Namespace) -> int:
    server = _server(args.address)
    jobs = server.jobs()
    lines = [job_lines(job, details=False) for job in jobs]
    if jobs:
        _note(args.address, lines)
    else:  # Ray forgets them with the head
        lines = [f"no Nightgrid job at {server.address}", *_last_seen(args.address)]
    return shared.print_answer(args, [dataclasses.asdict(job) for job in jobs], *lines, indent=1)


def _one_there(args: argparse.Namespace) -> int:
    """Show a job, and the run that it drives; or a run that was started on the cluster itself."""
    server = _server(args.address)
    job = server.sent(args.id)
    name = job.run if job is not None and job.run else args.id
    results = directory_there(args.results, job)
    jobs = [job] if job is not None else []
    served = next(iter(served_runs(server, results, jobs, name) or ()), None)
    sent_at = job.started_at or math.inf if job is not None and not job.over else 0.0
    fields: dict[str, object] = {} if job is None else dataclasses.asdict(job)
    fields["run_status"] = None
    lines = [] if job is None else [job_lines(job, details=True)]
    try:
        if served is not None:
            status = served.status
            fields["run_status"] = _status_json(name, served.rows, status.final_rows, status)
            lines.append(status_lines(served))
        elif time.time() - sent_at < _START_S:
            lines.append("  its driver has not reported yet")
        elif args.json:
            fields["run_status"] = server.answer(["status", name], results)
        else:
            lines.append(server.ask(["status", name], results=results))
    except SubmitError as error:
        failed = isinstance(error, HeadJobFailed)
        if job is None and failed:
            raise SubmitError(f"no job and no run '{args.id}' at {error}") from error
        if job is None or not (failed or args.json):
            raise
        lines.append(str(error))  # its driver has not come to its run yet
    if lines:
        _note(args.address, lines)
    return shared.print_answer(args, fields, *lines, indent=1)


def job_lines(job: JobInfo, *, details: bool) -> str:
    """A job in one line, or with its command and times."""
    line = f"{job.submission_id}  {job.status}" + (f"  run {job.run}" if job.run else "")
    if job.started_at is not None:
        line += f"  for {duration((job.ended_at or time.time()) - job.started_at)}"
    if not details:
        return line
    line += f"  by {job.submitter}" if job.submitter else ""
    lines = [line, f"  {concealed(job.entrypoint)}"]
    if job.exit_code is not None:
        lines.append(f"  exit code {job.exit_code}")
    if job.message and job.status != "RUNNING":  # of such a job Ray says just that
        lines.append(f"  {job.message.strip().splitlines()[-1]}")
    return "\n".join(lines)


def _status_json(
    run: str, rows: str, final_rows: int, status: RunStatus | None
) -> dict[str, object]:
    """``status``: the fields of ``RunStatus``, None where no driver wrote any."""
    return {
        "run": run,
        "rows": rows,
        "final_rows": final_rows,
        "age_s": None if status is None else time.time() - status.at,
        "status": None if status is None else dataclasses.asdict(status),
    }


def _final_rows(store: Store) -> int:
    return sum(row.final for row in store.history())


def run_lines(store: Store) -> str:
    """The run's state: its driver's last status, else the number of rows."""
    status = read_status(store)
    if status is None:
        return f"{store.run}: {_final_rows(store)} final rows, no status of a driver"
    results = str(store.path.parent.resolve())
    return status_lines(ServedRun(run=store.run, results=results, status=status))


def status_lines(run: ServedRun) -> str:
    """A run's state by its driver's last status."""
    status = run.status
    lines = [f"{run.run}: {summary_line(dataclasses.replace(status, answers=()))}"]
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
    lines += [f"  {one.question}: {one.sentence}\n    {one.basis}" for one in status.answers]
    lines += [f"  SLOW card {slow}" for slow in status.slow_cards]
    lines.append(f"  rows: {run.rows}")
    return "\n".join(lines)


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid runs                                       the newest runs here
      nightgrid runs --address http://127.0.0.1:8265       those on a cluster's head node

    states: STARTING (sent, and not begun yet), WAITING for cards that others have, RUNNING, PAUSED
    (no room for rows), STOPPING, STOPPED, FINISHED, DIED (its driver is gone; the same command goes
    on)
    exit codes: 0; 4 there are no runs; 5 the cluster is not reachable
    """
    shared.add_place_arguments(parser)
    parser.add_argument(
        "--last", metavar="N", type=int, default=MOST_LISTED, help="so many (default: %(default)s)"
    )
    shared.add(parser, "--json")


def run_runs(args: argparse.Namespace) -> int:
    """List the runs."""
    if args.address:
        entries = _there(args)
    else:
        serve_in_job(args)
        entries = run_entries(shared.results_here(args), args.last)
    values = [dataclasses.asdict(entry) for entry in entries]
    lines = entry_lines(entries, time.time())
    if args.address and entries:
        _note(args.address, lines)
    return shared.print_answer(args, values, *lines)


def _there(args: argparse.Namespace) -> list[RunEntry]:
    """Runs of a cluster's head, and submitted ones that have not begun."""
    server = _server(args.address)
    place = directory_there(args.results, None)
    jobs = [job for job in server.jobs() if directory_there(None, job) == place]
    served = served_runs(server, place, jobs)
    if served is not None:
        newest = served[: args.last]
        return with_sent([entry_by_status(one.run, one.status) for one in newest], jobs)
    try:
        entries = server.answer(["runs", "--last", str(args.last)], place)
    except SubmitError:
        if not any(job.run and not job.over for job in jobs):
            raise
        entries = []  # the first run of the cluster has made no directory yet
    return with_sent([entry_of(entry) for entry in entries], jobs)


DEFAULT_PORT = 8600
#: Seconds between two copies of a cluster's run.
COPY_EVERY_S = 10.0


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """example:
      nightgrid watch smoke       then open the address that it prints
      nightgrid watch smoke --address http://head:8265    of a cluster: its files are copied to here

    The page reads the run's own files, so the driver may run elsewhere on the same storage.
    From another machine:  ssh -L 8600:127.0.0.1:8600 HOST, then http://127.0.0.1:8600/
    With --host other than loopback a token is made and asked for; what is sent is not encrypted.
    exit codes: 0 ended by Ctrl-C or SIGTERM; 1 the address cannot be had; 4 no such run
    """
    parser.add_argument("run_name", nargs="?", metavar="RUN", help="default: the newest run")
    shared.add_results_argument(parser)
    shared.add_copy_argument(parser)
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="where to listen (default: %(default)s, for this machine alone)",
    )
    parser.add_argument(
        "--port",
        metavar="NUMBER",
        type=shared.number(int, 0, 65535, "a port: give a number from 0 to 65535"),
        default=DEFAULT_PORT,
        help="0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--token", action="store_true", help="ask for a token on loopback too (other users here)"
    )


def run_watch(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; in the background of a shell, Ctrl-C is not heard."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not args.address:
        return _serve(args)
    copy = RunCopy(args.address, shared.named_run(args), args.results)
    with copy.following(COPY_EVERY_S):
        args.run_name = copy.name
        return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    # The page itself says what is damaged; the log would say so every two seconds.
    logging.getLogger("nightgrid.store").setLevel(logging.ERROR)
    store = find_run(args.run_name, args.results)
    beyond = not is_loopback(args.host)
    token = secrets.token_urlsafe(24) if beyond or args.token else None
    try:
        server = WatchServer(args.host, args.port, store=store, feed=RunFeed(store), token=token)
    except (OSError, TypeError, ValueError) as error:  # the latter two of what is no host's name
        why = getattr(error, "strerror", None) or error
        raise NightgridError(
            f"cannot listen on {args.host} port {args.port}: {why}; "
            "--port 0 takes a free port, --host is an address of this machine"
        ) from error
    with server:
        name = socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host
        name = f"[{name}]" if ":" in name else name
        query = f"?{TOKEN}={token}" if token else ""
        output.say(f"{store.run}: http://{name}:{server.server_address[1]}/{query}")
        if beyond:
            output.say("  anyone who has this address can watch; the connection is not encrypted")
        output.say("  Ctrl-C ends the page, not the run")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            output.say()
    return 0
