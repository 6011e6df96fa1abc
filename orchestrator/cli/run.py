"""``nightgrid run FILE``: measure a grid and report, with ``driver.run.run_grid``."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli import options as shared
from orchestrator.cli.main import missing_package
from orchestrator.core import errors
from orchestrator.core.errors import (
    ClusterError,
    ControlStoreLost,
    GridError,
    NightgridError,
    Problem,
    StoreError,
)
from orchestrator.store import files as run_files
from orchestrator.util import output
from orchestrator.util.host import CallAt, Interval

if TYPE_CHECKING:
    from orchestrator.driver.options import RunOptions
    from orchestrator.driver.run import RunOutcome
    from orchestrator.driver.supervisor import SupervisorLink
    from orchestrator.grid.parser import Grid
    from orchestrator.store.store import Store

#: Set to anything, it means --no-restart.
NO_RESTART_VARIABLE = "NIGHTGRID_NO_RESTART"
#: Seconds before the deadline at which another process writes the report if this one has not.
LAST_S = 20.0


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid run grids/smoke.yaml --emulate 2x8      emulated cards of this machine
      nightgrid run grids/smoke.yaml                    of RAY_ADDRESS, else this machine's cards
      nightgrid run grids/smoke.yaml --retry-failed     only what is missing, and what failed
      nightgrid run grids/smoke.yaml --set axes.batch_size=1..8    another axis than the file's

    exit codes:
      0    every job succeeded, or is known not to fit or not to exist here
           (SUCCEEDED, OUT_OF_MEMORY, PRUNED, UNSUPPORTED)
      10   some job FAILED, TIMED_OUT, was LOST or NOT_STARTED, or none succeeded; see the report
      2    the grid file is refused;  3  no usable cluster;  4  results cannot be read or written;
      7    an optional package is missing
      130  ended at once by a third signal; run the same command again to go on

    The first Ctrl-C (or SIGTERM) lets running jobs end and starts no more, a second stops them too;
    every job still gets its row. A third ends at once.
    A driver that dies (killed, or ended by Ray because the cluster's head is gone) is started again
    once the head answers, and goes on with the run; --no-restart: it is not. So is one in a Ray
    job, unless its head dies, and the job with it: the same `submit` goes on with the run.
    Where results go: --results, else the grid's `results:`, else $NIGHTGRID_RESULTS, else
    ./results; inside a Ray job, whose working directory is thrown away, ~/nightgrid-results on the
    node that drives the run. With --results s3://BUCKET/PREFIX (or gs://…) they go there as well,
    and a copy follows to the bucket.
    """
    shared.add_grid_arguments(parser, optional=True)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on after a driver that died, also one on another host; without FILE: the newest "
        "run (or --run), with its grid and its cards",
    )
    parser.add_argument(
        "--retry-flagged",
        action="store_true",
        help="at the end, measure again the rows of earlier invocations that something disturbed "
        "(those of this one: `measure: {repeat_flagged: N}`)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the Ray cluster to run on (default: RAY_ADDRESS, or the job's own cluster)",
    )
    where.add_argument(
        "--in-process",
        action="store_true",
        help="one job at a time in this very process, without Ray: for debuggers",
    )
    shared.add(parser, "--verbose")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the report")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the report as one JSON object on standard output, progress on standard error",
    )
    shared.add_deadline_arguments(parser)
    shared.add(parser, "--notify")
    rare = parser.add_argument_group("rarely needed")
    shared.add(rare, "--priority", "--wait-for-cards")
    rare.add_argument(
        "--card-memory",
        metavar="GIB",
        type=_gibibytes,
        dest="card_memory_bytes",
        help="memory of each emulated card (default: its share of this machine's)",
    )
    rare.add_argument(
        "--remote-code",
        metavar="MODEL",
        action="append",
        default=[],
        help="let this model of the grid run the Python code that comes with it; may be repeated",
    )
    rare.add_argument(
        "--no-passports",
        action="store_false",
        dest="passports",
        help="do not measure each card's speed before its first job (0.2 s a card)",
    )
    rare.add_argument(
        "--no-restart",
        action="store_true",
        help="do not watch over the driver and start it again when it dies (default where "
        f"${NO_RESTART_VARIABLE} is set)",
    )
    rare.add_argument(
        "--keep-imports",
        action="store_true",
        help=argparse.SUPPRESS,  # accepted without effect: imports are not kept any more
    )
    rare.add_argument(
        "--log-to",
        metavar="TRACKER",
        action="append",
        default=[],
        help="give every row, as it comes, to mlflow=URI (default: $MLFLOW_TRACKING_URI) or "
        "wandb=[ENTITY/]PROJECT (without a key: its offline mode); may be repeated",
    )


def run_run(args: argparse.Namespace) -> int:
    """Plan, measure, report and notify; the exit code says how the jobs ended."""
    from orchestrator.driver.supervisor import link_to_supervisor

    if args.keep_imports:
        output.say_aside("--keep-imports has no effect any more: imports are not kept between runs")
    link = link_to_supervisor()
    if link is not None:
        return _drive_and_tell(args, link)
    command = command_to_supervise(args)
    if command is None:
        return _drive_and_tell(args, None)
    from orchestrator.driver.supervisor import Supervisor

    return Supervisor(command=command, notify=args.notify, ends_at=shared.ends_at(args)).run()


def _drive_and_tell(args: argparse.Namespace, link: SupervisorLink | None) -> int:
    """Drive the run, and report its end to the supervisor, if any."""
    code = 1
    try:
        code = _drive(args, link)
    except ControlStoreLost as error:
        code = error.exit_code
        if link is None:
            raise
        link.report(again=str(error))  # it says so
    except NightgridError as error:
        code = error.exit_code
        raise
    except ModuleNotFoundError as error:
        code = errors.ExtraMissing.exit_code if missing_package(error) else code
        raise
    except KeyboardInterrupt:
        code = errors.INTERRUPTED
        raise
    finally:
        if link is not None:
            link.report(ended=code)
        if link is not None or args.typed == sys.argv[1:]:  # else the process is another's
            _end_now_if_something_waits(code)
    return code


def _end_now_if_something_waits(code: int) -> None:
    """End this process without Ray's handlers, if Ray waits for a cluster that is gone."""
    gcs = sys.modules.get("orchestrator.on_ray.gcs")
    if gcs is None or not gcs.left_waiting:
        return
    error = sys.exc_info()[1]
    if error is not None:
        output.say_aside(f"nightgrid run: {error}")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def command_to_supervise(args: argparse.Namespace) -> list[str] | None:
    """This process's command if a supervised child should run it: not for code that calls
    ``main``."""
    alone = args.in_process or args.no_restart or os.environ.get(NO_RESTART_VARIABLE)
    typed = sys.argv[1:]
    if alone or args.typed != typed or sys.orig_argv[-len(typed) :] != typed:
        return None
    return [sys.executable, *sys.orig_argv[1:]]


def _drive(args: argparse.Namespace, link: SupervisorLink | None) -> int:
    from orchestrator.driver.options import with_results_of
    from orchestrator.driver.plan import grid_of, start_of
    from orchestrator.planning.forecast import CLUSTER
    from orchestrator.watch.notify import hooks_of, notice_of_failure, notice_of_run, tell_all

    hooks = hooks_of(args.notify)  # refused before anything starts
    source, options = _grid_and_options(args, link)
    grid = grid_of(source, options, elsewhere=start_of(options) == CLUSTER)
    there = options.results
    options = replace(with_results_of(grid, options), results_named=True)
    if args.grid is None:  # a run is gone on with where it lies, whatever its grid names
        options = replace(options, results=there)
    try:
        outcome, page, document = _measure_and_report(
            grid, options, as_json=args.json, verbose=args.verbose
        )
    except GridError:
        raise  # nothing was started; the user sees the error
    except BaseException as error:
        # The supervisor sends the notice of a driver that is started again.
        again = link is not None and (isinstance(error, ControlStoreLost) or link.restarted)
        if hooks and not again:
            notice = notice_of_failure(options.name or grid.name, options, error)
            tell_all(hooks, notice, output.say_aside)
        raise
    code = errors.INTERRUPTED
    if outcome.result.finished:
        code = 0 if outcome.answered else errors.JOBS_FAILED
    if hooks:
        tell_all(hooks, notice_of_run(outcome, page, code), output.say_aside)
    if args.json:  # last of all, since it is the one output whose loss is an error
        strict = output.guarded(sys.stdout, strict=True)
        for part in document:
            output.emit_json(part, strict)
    return code


def _grid_and_options(
    args: argparse.Namespace, link: SupervisorLink | None
) -> tuple[Path, RunOptions]:
    from orchestrator.driver.run import grid_to_resume

    options = shared.run_options(
        args,
        name=args.run_name,
        resume=args.resume or (link is not None and link.restarted),
        ends_at=link.ends_at if link is not None else shared.ends_at(args),
        supervisor=link,
    )
    if args.grid is not None:
        return args.grid, options
    if not args.resume:
        what = "no grid file is named"
        hint = "nightgrid run FILE, or nightgrid run --resume to go on with the newest run"
        raise GridError([Problem(file="FILE", message=what, hint=hint)])
    source, name = grid_to_resume(options)
    return source, replace(options, name=name)


def _measure_and_report(
    grid: Grid, options: RunOptions, *, as_json: bool, verbose: bool
) -> tuple[RunOutcome, Path | None, Iterable[str]]:
    """Run and report: the outcome, the page unless the run was cut short, and with ``as_json`` the
    report to be printed."""
    from orchestrator.driver.run import run_grid

    # With --json standard output holds one document and nothing else.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        with _report_in_any_case(options.name or grid.name, options):
            outcome = run_grid(grid, options, output.say)
        if not outcome.result.finished:
            output.say(f"Interrupted ({outcome.result.reason}). The same command resumes the run.")
            return outcome, None, ()
    page, document = _report(outcome.store, as_json=as_json, verbose=verbose)
    if outcome.mirror is not None:
        outcome.mirror.copy()  # of the page, too
        where = outcome.mirror.trouble or f"copied to {outcome.mirror.address}"
        (output.say_aside if as_json else output.say)(where)
    return outcome, page, document


@contextlib.contextmanager
def _report_in_any_case(run: str, options: RunOptions) -> Iterator[None]:
    """Have the report written by the deadline even if this process hangs in a dead cluster or
    gives it up."""
    command = [sys.executable, "-m", "orchestrator", "report", run]
    command += ["--results", str(options.results.resolve())]
    rows = options.results / run / run_files.ROWS
    before = _changed_at(rows)

    def write() -> None:
        if _changed_at(rows) != before:  # else nothing was measured
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)

    timer = None
    if options.ends_at is not None:
        now = Interval().until_now if options.budget else time.time
        timer = CallAt(options.ends_at - LAST_S, write, wall=now)
    try:
        yield
    except ClusterError as error:
        if options.supervisor is None or not isinstance(error, ControlStoreLost):
            write()  # else the supervisor does
        raise
    finally:
        if timer is not None:
            timer.cancel()


def _changed_at(directory: Path) -> int:
    """Time of a directory's last change, by its file system's clock; 0 where there is none."""
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return 0


def _report(store: Store, *, as_json: bool, verbose: bool) -> tuple[Path | None, Iterable[str]]:
    """Write the page; print the tables and where everything is, or make one JSON document."""
    from orchestrator.report.run_report import read_summary, write_page
    from orchestrator.report.text import print_summary

    summary, measurements = read_summary(store, lean=True)
    page, why = None, ""
    try:
        page = write_page(store, summary, measurements)
    except StoreError as error:  # the rows are safe, and a page can be made of them at any time
        why = f"the page was not written: {error}; `nightgrid report {store.run}` writes it later"
    if as_json:
        from orchestrator.report.export import json_parts

        if why:
            output.say_aside(why)
        return page, json_parts(summary)
    output.say(f"rows: {store.tables_path.resolve()}")
    where = str(page.resolve()) if page is not None else ""
    print_summary(summary, output.console(), verbose=verbose, page=where)
    if why:
        output.say(why)
    return page, ()


def _gibibytes(text: str) -> int:
    wanted = "a size in GiB, such as 2 or 0.5"
    return round(shared.number(float, 1e-6, 2**20, wanted)(text) * 2**30)
