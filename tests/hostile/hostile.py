"""Ten thousand hostile inputs (part of `make rehearsal`): directories of results, side files,
models, datasets, grids and command lines, generated from a seed. None may end in a traceback, hang
for ten seconds, end with an undocumented code, or change what it only reads.

    python tests/hostile/hostile.py [--inputs N] [--seed S] [--only NUMBER ...] [--output DIR]

Writes ``hostile.json``; exit code 1 if there is a finding. ``--only`` replays
inputs by their number and prints everything.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import io
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from hostile_worlds import FEED, WRITER, Case, Worlds  # noqa: E402
from measurements import row  # noqa: E402

SEED = 20261122
#: What commands import on demand, so that the workers, which are forked, have it.
PRELOADED = (
    *("torch", "transformers", "duckdb", "mlflow", "pyarrow.parquet", "pyarrow.dataset"),
    *("rich.console", "typst", "workloads.models.describe"),
    *("orchestrator.on_ray.cluster", "orchestrator.on_ray.jobs", "orchestrator.report.html"),
    *("orchestrator.report.figures", "orchestrator.watch.server"),
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\w+)')


def signature(trouble: str) -> str:
    """The trait that findings of one cause share: the last place in our code, and the error."""
    frames = [f for f in _FRAME.findall(trouble) if re.search("/(orchestrator|workloads)/", f[0])]
    if trouble.startswith("hang"):  # faulthandler names the innermost frame first
        frames = frames[:1]
    last = trouble.strip().splitlines()[-1] if frames else trouble.strip().splitlines()[0]
    if not frames:
        return re.sub(r"/\S*/", "", re.sub(r"\d+", "N", last))[:100]
    path, number, name = frames[-1]
    where = re.sub(r".*/(orchestrator|workloads)/", r"\1/", path) + f":{number} {name}"
    what = "hang" if trouble.startswith("hang") else last.partition(":")[0]
    return f"{where}: {what}"


class Findings:
    """Inputs, exit codes of their commands, and findings by cause."""

    def __init__(self, *, loud: bool) -> None:
        self.loud = loud
        self.inputs: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.causes: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def add(self, number: int, about: tuple[str, str], results: list[Told]) -> None:
        kind, what = about
        self.inputs[kind] += 1
        for one in results:
            self.codes[str(one["code"])] += 1
            if self.loud:
                print(f"--- {number} {kind}: {what}\n{one['line']}\n{one['said']}{one['trouble']}")
                print(f"code {one['code']}, {one['seconds']:.2f} s")
            if one["trouble"]:
                cause = signature(one["trouble"])
                if cause not in self.causes and not self.loud:
                    print(f"{number} {kind}: {cause}", flush=True)
                self.causes[cause].append({"number": number, "kind": kind, "about": what, **one})
        if self.inputs.total() % 500 == 0 and not self.loud:
            print(f"{self.inputs.total():,} inputs, {len(self.causes)} causes", flush=True)

    def __str__(self) -> str:
        """Inputs by kind, exit codes, and the shortest finding of each cause."""
        lines = [f"inputs {dict(self.inputs)}", f"exit codes {dict(self.codes)}"]
        for cause, findings in sorted(self.causes.items(), key=lambda item: -len(item[1])):
            one = min(findings, key=lambda one: len(one["about"]) + len(str(one["line"])))
            lines.append(
                f"{cause}: {len(findings)} times; {one['number']}, {one['kind']}: "
                f"{one['about']!r:.90} {' '.join(one['line'])!r:.70}"
            )
        return "\n".join(lines)


def preload(names: Iterable[str] = PRELOADED) -> None:
    """Import in the first process what commands import, so that its forks have it."""
    import importlib

    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"without {name}: {error}")


# ---------------------------------------------------------------- the process of the cases

LIMIT_S = 10.0
MEMORY_BYTES = 8 * 2**30

Told = dict[str, Any]


def limit_s() -> float:
    """The time limit of a command: ten seconds, and more on a machine that is busy with others."""
    return LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def serve(pipe: Connection, base: Path, seed: int, stacks: str) -> None:
    with open(stacks, "w", buffering=1) as file:  # before it becomes read-only for new openings
        _confine(base)
        _make_deterministic(base)
        worlds = Worlds(base, seed)
        pipe.send("ready")
        while (number := pipe.recv()) is not None:
            faulthandler.dump_traceback_later(limit_s(), file=file)
            case = worlds.case(number)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(("case", case.kind, case.about, case.lines))
            for line in case.lines:
                file.seek(0)
                file.truncate()
                faulthandler.dump_traceback_later(limit_s() * 0.9, file=file)
                told = ask(line, case, base)
                faulthandler.cancel_dump_traceback_later()
                pipe.send(("line", told))
            pipe.send(("done",))


def _confine(base: Path) -> None:
    """Leave this process one directory to write to, if it has the right to take the others away."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(0x00020000) != 0:  # CLONE_NEWNS
        if os.geteuid() == 0:
            raise SystemExit("as root, and without mount namespaces, this could overwrite anything")
        return
    readonly, remount, bind, private = 1, 32, 4096, (1 << 18) | 16384
    _mounted(libc.mount(None, b"/", None, private, None))
    with open("/proc/self/mountinfo") as lines:
        points = [line.split()[4] for line in lines]
    for point in points:
        _mounted(libc.mount(None, point.encode(), None, remount | bind | readonly, None))
    _mounted(libc.mount(b"tmpfs", str(base).encode(), b"tmpfs", 0, b"size=2g"))

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    class Data(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]

    header = Header(0x20080522, 0)
    _mounted(libc.capset(ctypes.byref(header), (Data * 2)()))  # none


def _mounted(answer: int) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _make_deterministic(base: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("RAY_", "NIGHTGRID_", "HF_", "MLFLOW_")):
            del os.environ[name]
    home = base / "home"
    home.mkdir(exist_ok=True)
    os.environ |= {
        "HOME": str(home),
        "TMPDIR": str(home),
        "NIGHTGRID_CACHE": str(base / "cache"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    tempfile.tempdir = None
    os.chdir(home)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"select 1\n"))
    _stop_before_clusters()


def _stop_before_clusters() -> None:
    """Refuse to start or join a cluster: everything before it is real."""
    from orchestrator.core.errors import ClusterError
    from orchestrator.driver import session
    from orchestrator.on_ray import cluster

    def refuse(*_: object, **__: object) -> Any:
        raise ClusterError("no cluster is started in this test")

    sessions = ("emulated_session", "cluster_session", "in_process_session")
    for name in (*sessions, "emulate", "connect"):
        for module in (session, cluster):
            if hasattr(module, name):
                setattr(module, name, refuse)


def ask(line: list[str], case: Case, base: Path) -> Told:
    from orchestrator.core.errors import MEANINGS

    before = {path: listing(path) for path in case.keep}
    said = io.BytesIO()
    out = io.TextIOWrapper(said, encoding="utf-8", errors="strict", write_through=True)
    err = io.TextIOWrapper(said, encoding="utf-8", errors="backslashreplace", write_through=True)
    code: int | None = None
    trouble = ""
    began = time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = _perform(line, base)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            trouble = "".join(traceback.format_exception(error, limit=-40))
    seconds = time.perf_counter() - began
    words = said.getvalue().decode("utf-8", "replace")
    if not trouble and "Traceback" in words:
        trouble = words[words.index("Traceback") :]
    if not trouble and code not in MEANINGS:
        trouble = f"exit code {code} is none of the documented ones"
    if not trouble and code not in (0, 10) and not words.strip():
        trouble = f"it ends with {code} and says nothing"
    if not trouble:
        for path, was in before.items():
            if changed := _changes(was, listing(path), line):
                trouble = f"reading changed {changed}"
    logging.getLogger("nightgrid.store").setLevel(logging.NOTSET)
    said_last = words[-20000:]
    return {"line": line, "seconds": seconds, "code": code, "trouble": trouble, "said": said_last}


def _perform(line: list[str], base: Path) -> int:
    from orchestrator.cli.main import main

    results = base / "case" / "results"
    if line[0] == FEED:
        return _feed(results)
    if line[0] == WRITER:
        return _write(results)
    return main(line)


def _write(results: Path) -> int:
    from orchestrator.core.errors import NightgridError
    from orchestrator.store.store import Store

    try:
        with Store(results, "night") as store:
            store.append(row(7))
            store.compact()
    except NightgridError as error:
        print(error)
        return error.exit_code
    except OSError as error:  # which ``main`` tells of in the same way
        print(error)
        return NightgridError.exit_code
    return 0


def _feed(results: Path) -> int:
    """Serve the live view, and look at every address of it twice."""
    from orchestrator.core.errors import NightgridError
    from orchestrator.store.store import find_run
    from orchestrator.watch.server import WatchServer
    from orchestrator.watch.state import RunFeed

    class Loud(WatchServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            traceback.print_exc()

    logging.getLogger("nightgrid.store").setLevel(logging.ERROR)
    try:
        store = find_run("night", results)
    except NightgridError as error:
        print(error)
        return error.exit_code
    with Loud("127.0.0.1", 0, store=store, feed=RunFeed(store), token=None) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for path in ("/", "/state", "/report", "/state", "/%00", "/../x"):
            try:
                with urllib.request.urlopen(address + path, timeout=LIMIT_S) as answer:
                    body = answer.read()
                if path == "/state":
                    json.loads(body)
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
        server.shutdown()
        thread.join()
    return 0


def listing(directory: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for at, directories, names in os.walk(directory):
        for name in [*directories, *names]:
            path = os.path.join(at, name)
            with contextlib.suppress(OSError):
                facts = os.lstat(path)
                found[path] = (facts.st_mode, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return found


def _changes(was: dict[str, Any], now: dict[str, Any], line: list[str]) -> str:
    """The changes, but for the file that a command writes and for directories that hold it."""
    names = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    if own := {"report": "report.html", "predict": "predictions.parquet"}.get(line[0]):
        kept = {n for n in now if os.path.isdir(n) and not os.path.islink(n)}
        names = [n for n in names if os.path.basename(n) != own and n not in kept]
    return ", ".join(names[:3])


class Worker:
    def __init__(self, base: Path, seed: int) -> None:
        self._base, self._seed = base, seed
        self._stacks = base.with_name(base.name + "-stacks.txt")
        self._process: Any = None
        self._pipe: Any = None

    def run(self, number: int) -> tuple[tuple[str, str], list[Told]]:
        """Run a case: its kind, what it is about, and what came of each of its lines."""
        if self._process is None:
            self._start()
        told: list[Told] = []
        lines: list[list[str]] = []
        about = ("?", "?")
        self._pipe.send(number)
        while True:
            began = time.perf_counter()
            limit = 2 * limit_s() + 30 if not lines else limit_s() + 1
            heard = self._pipe.poll(limit)
            try:
                message = self._pipe.recv() if heard else ("hang",)
            except EOFError:
                message = ("died",)
            if message[0] == "case":
                about, lines = (message[1], message[2]), message[3]
            elif message[0] == "line":
                told.append(message[1])
            elif message[0] == "done":
                return about, told
            else:
                told.append(self._end(message[0], lines, told, time.perf_counter() - began))
                return about, told

    def _end(self, how: str, lines: list[list[str]], told: list[Told], seconds: float) -> Told:
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        status = self._process.exitcode
        self._process = None
        stack = Path(self._stacks).read_text()[-3000:] if how == "hang" else f"exit {status}"
        line = lines[len(told)] if len(told) < len(lines) else ["(making the case)"]
        about = {"line": line, "seconds": seconds, "code": None, "said": ""}
        return about | {"trouble": f"{how}: {stack}"}

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self._base, self._seed, str(self._stacks)), daemon=True
        )
        self._process.start()
        theirs.close()
        if not self._pipe.poll(120) or self._pipe.recv() != "ready":
            raise RuntimeError("the worker does not start")

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(10)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._process = None


def run_cases(
    numbers: list[int], seed: int, each: Callable[[int, tuple[str, str], list[Told]], None]
) -> None:
    """Run cases by a worker with a directory of its own, telling of each."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        base = Path(name) / "base"
        base.mkdir()
        worker = Worker(base, seed)
        try:
            for number in numbers:
                each(number, *worker.run(number))
        finally:
            worker.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, nargs="*", default=None)
    parser.add_argument("--output", type=Path, default=Path("rehearsal"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.time()
    preload()
    findings = Findings(loud=args.only is not None)
    numbers = args.only or list(range(args.inputs))
    try:
        run_cases(numbers, args.seed, findings.add)
    except KeyboardInterrupt:
        print("interrupted")
    print(findings)
    if args.only is None:
        args.output.mkdir(parents=True, exist_ok=True)
        figures = {
            "seed": args.seed,
            "wall_s": time.time() - began,
            "inputs": findings.inputs,
            "codes": findings.codes,
            "causes": findings.causes,
        }
        (args.output / "hostile.json").write_text(json.dumps(figures, indent=1))
    print(f"seed {args.seed}, {(time.time() - began) / 60:.1f} min")
    return 1 if findings.causes else 0


if __name__ == "__main__":
    sys.exit(main())
