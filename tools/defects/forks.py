"""Run pytest in forks of a process that has imported the large libraries once.

Their import takes most of a run of a few tests. Each fork imports the product and the tests anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class Forks:
    """The process that forks, as long as the context lasts."""

    def __init__(self, libraries: Sequence[str]) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def start(
        self, arguments: Sequence[str], *, at: Path, environment: Mapping[str, str], log: Path
    ) -> int:
        """Run pytest in a directory, in a session of its own; return its process id."""
        assert self._server.stdin is not None
        asked = (list(arguments), str(at), dict(environment), str(log))
        self._server.stdin.write(json.dumps(asked).encode() + b"\n")
        self._server.stdin.flush()
        return self._answer()

    def status(self, timeout_s: float) -> int | None:
        """The exit status of what was started last, once; None while it runs."""
        ready, _, _ = select.select([self._server.stdout], [], [], timeout_s)
        return self._answer() if ready else None

    def _answer(self) -> int:
        assert self._server.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            if not (more := os.read(self._server.stdout.fileno(), 1)):
                raise RuntimeError("the process that forks has ended")
            line += more
        return int(line)


def _serve(libraries: Sequence[str]) -> None:
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        if (child := os.fork()) == 0:
            _run(*asked)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(arguments: list[str], at: str, environment: dict[str, str], log: str) -> None:
    """Be ``python -m pytest`` in that directory and environment."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(at)
    sys.path[0] = at
    sys.path[1:1] = environment["PYTHONPATH"].split(os.pathsep)
    status = 3
    try:
        import pytest

        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1:])
