"""Status and copies of a cluster's runs, read over its dashboard.

Ray's dashboard serves files below a node's log directory, through links in it too. A driver links
its results directory from there, and a workstation reads the ``status.json`` of its runs (two
requests of some 20 ms) or copies their files.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from orchestrator.core.errors import StoreError, SubmitError
from orchestrator.core.status import RunStatus
from orchestrator.on_ray.jobs import (
    HeadJobFailed,
    JobInfo,
    JobServer,
    directory_there,
)
from orchestrator.store.files import (
    REQUESTS,
    ROWS,
    RUN_ID,
    STATUS,
    default_results_dir,
    inside_ray_job,
)
from orchestrator.store.remote import copy_directory, receive
from orchestrator.util.redaction import error_line
from workloads.util import files

_LINKS = "nightgrid"  # in the log directory: NAME OF RESULTS/ABSOLUTE PATH -> that directory
_DEFAULT = "default"
#: Runs whose status is read; a head job lists more.
_MOST_READ = 100
#: Difference of times on one head that says nothing.
_SLACK_S = 10.0


# ---------------------------------------------------------------- on a node of the cluster


def serve_results(results: Path) -> None:
    """Have the dashboard serve the runs of a directory, best-effort; needs Ray or a Ray job."""
    ray = sys.modules.get("ray")
    node = ray._private.worker._global_node if ray is not None else None
    logs = Path(node.get_logs_dir_path()) if node is not None else None
    for parent in Path.cwd().parents:  # a Ray job's is below its session's directory
        if parent.name == "runtime_resources":
            logs = parent.parent / "logs"
    if logs is None:
        return
    path = results.absolute()
    names = [str(path)]
    with contextlib.suppress(ValueError):
        names.append(f"~/{path.relative_to(Path.home())}")
    if inside_ray_job() and path == default_results_dir().absolute():
        names.append(_DEFAULT)
    for name in names:
        link = logs / _LINKS / quote(name, safe="") / quote(str(path), safe="")
        with contextlib.suppress(OSError):  # there already, or a name that is too long
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path, target_is_directory=True)


# ---------------------------------------------------------------- on a workstation


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A run's status, and its results directory on the head."""

    run: str
    results: str
    status: RunStatus

    @property
    def rows(self) -> str:
        """Directory of its rows."""
        return f"{self.results}/{self.run}/{ROWS}"


def served_runs(
    server: JobServer, results: str, jobs: Iterable[JobInfo], run: str = ""
) -> list[ServedRun] | None:
    """The runs of a results directory of the head (empty: the default), or one of them, newest
    first. ``jobs``: those that were submitted to the directory.

    Returns None if only a head job can tell: no driver has linked the directory, there are too many
    runs, or a silent driver was not submitted, so that its lock must be looked at.
    """
    by_run: dict[str, JobInfo] = {}
    for job in jobs:  # newest first
        by_run.setdefault(job.run, job)
    try:
        linked = f"{_LINKS}/{quote(results or _DEFAULT, safe='')}/*/*/{STATUS}"
        paths = [p for p in server.client.head_files(linked) if run in ("", _run_of(p))]
        if not paths or len(paths) > _MOST_READ:
            return None
        with ThreadPoolExecutor(4) as side_by_side:
            texts = list(side_by_side.map(server.client.head_file, paths))
        served = [
            ServedRun(
                run=_run_of(path),
                results=unquote(path.split("/")[-3]),
                status=RunStatus.from_json(text.decode()),
            )
            for path, text in zip(paths, texts, strict=True)
        ]
    except (RuntimeError, OSError, ValueError, KeyError):  # another Ray's interface, half a file
        return None
    judged = [_judged(one, by_run.get(one.run)) for one in served]
    known = sorted(filter(None, judged), key=lambda one: -one.status.at)
    return known if len(known) == len(judged) else None


def _run_of(path: str) -> str:
    return path.split("/")[-2]


def _judged(served: ServedRun, job: JobInfo | None) -> ServedRun | None:
    """Judge by its job whether a run's driver lives; None if that cannot be known."""
    status = served.status
    if status.finished:
        return served
    if job is not None and not job.over:
        return served  # its supervisor lives, and starts another driver
    if job is not None and status.at < (job.ended_at or 0.0) + _SLACK_S:
        return replace(served, status=status.without_driver())
    return served if abs(time.time() - status.at) < 60 else None


# ---------------------------------------------------------------- copies on a workstation


class RunCopy:
    """A copy in ``results / name`` of a cluster's run, named by it or a job's id; ``there`` is its
    results directory on the head.

    Raises SubmitError if the dashboard cannot be read, StoreError if the name has another run
    (``copy_directory``), or there is none.
    """

    def __init__(
        self,
        address: str | None,
        run: str,
        results: Path,
        *,
        there: str | None = None,
        name: str | None = None,
    ) -> None:
        self.server = JobServer(address)
        job = self.server.sent(run)
        self.run = job.run if job is not None and job.run else run
        self.there = directory_there(there, job)  # empty for the head's default
        self.results, self.name = results, name or self.run

    def copy(self) -> list[str]:
        """Copy what is missing or may have changed; returns the names of the files."""
        try:
            paths = self._paths()
            if not paths:  # a job on the head links the results
                self.server.ask(["status", self.run], results=self.there)
                paths = self._paths()
            if not paths:
                raise LookupError(f"{self.there or 'its results'} cannot be linked")
            run_id = self._read(paths, RUN_ID).split(b"\n")[0].decode() if RUN_ID in paths else ""
            here = copy_directory(self.results, self.name, self.server.address, run_id)
            # The status last: the rows that it counts precede it.
            names = sorted(paths, key=lambda name: name == STATUS)
            return receive(names, lambda name: self._read(paths, name), here)
        except HeadJobFailed as error:
            raise StoreError(str(error)) from error  # there is no such run
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            reason = error_line(error)
            raise SubmitError(f"{self.server.address} serves no files of runs: {reason}") from error

    @contextlib.contextmanager
    def following(self, every_s: float) -> Iterator[None]:
        """Copy, then again in a thread within the block, until the run has finished."""
        ended = threading.Event()

        def follow() -> None:
            finished = False
            while not finished and not ended.wait(every_s):
                with contextlib.suppress(OSError, ValueError):
                    text = files.read_text(self.results / self.name / STATUS)
                    finished = RunStatus.from_json(text).finished  # what is there now is the rest
                with contextlib.suppress(SubmitError, StoreError):  # the next try may do better
                    self.copy()

        self.copy()
        threading.Thread(target=follow, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _paths(self) -> dict[str, str]:
        """Path of each file of the run in the log directory of the head, by its name in the run."""
        linked = f"{_LINKS}/{quote(self.there.rstrip('/') or _DEFAULT, safe='')}/*/{self.run}"
        patterns = (f"{linked}/{name}" for name in ("*", f"{ROWS}/*", f"{REQUESTS}/*"))
        paths = [path for one in patterns for path in self.server.client.head_files(one)]
        return {path.split("/", 4)[-1]: path for path in paths if not path.endswith("/")}

    def _read(self, paths: Mapping[str, str], name: str) -> bytes:
        try:
            return self.server.client.head_file(paths[name])
        except RuntimeError as error:
            if "file is not found" in str(error):
                raise FileNotFoundError(name) from error
            raise
