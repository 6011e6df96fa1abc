"""Read a stranger's files in a process that can be ended, with limits of time and memory.

One child answers several requests, a JSON line each, and ends when none has come for a while, or
with its parent. It says what it reads before it does, so that a file on which it hangs or runs out
of memory is named. A child that overran is killed, and the next request starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from typing import Any

#: Limits of a request that needs no torch.
SECONDS, BYTES = 10.0, 2**30
_IDLE_S = 10.0
#: Limit of an answer.
_ANSWER_BYTES = 16 * 2**20


class Ended(Exception):
    """A request overran a limit; the message names what was read, and the limit."""


class Bounded:
    """A child process with limits, started when it is first needed."""

    def __init__(
        self, *, seconds: float = SECONDS, memory_bytes: int = BYTES, of: str = "AS"
    ) -> None:
        """``of``: AS limits all that is mapped, DATA leaves out mapped files (large libraries)."""
        self.seconds = seconds
        self.memory_bytes = memory_bytes
        self._limit = of
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def call(self, function: str, **arguments: Any) -> Any:
        """Return what ``module:function`` returns, both ways as JSON.

        Raises:
            Ended: it took too long or too much memory, or died.
        """
        line = json.dumps([function, arguments]).encode() + b"\n"
        with self._lock:
            for attempt in range(2):
                process = self._running()
                try:
                    assert process.stdin is not None
                    process.stdin.write(line)
                    process.stdin.flush()
                    return self._answer(process)
                except (BrokenPipeError, _Gone):  # it was idle for too long just now
                    self.end()
                    if attempt:
                        raise Ended("the process that reads ended at once") from None
        raise AssertionError("unreachable")

    def _running(self) -> subprocess.Popen[bytes]:
        alive = self._process is not None and self._process.poll() is None
        if self._process is None or not alive or self._owner != os.getpid():
            if self._owner == os.getpid():
                self.end()
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self._limit, str(self.memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
            )
            self._owner = os.getpid()
            atexit.register(self.end)
        return self._process

    def _answer(self, process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout is not None
        stage, pending = "", b""
        until = time.monotonic() + self.seconds
        while True:
            left = until - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                self.end()
                raise Ended(f"{stage or 'it'}: reading took more than {self.seconds:.0f} s")
            piece = os.read(process.stdout.fileno(), 2**16)
            pending += piece
            if not piece or len(pending) > _ANSWER_BYTES:
                code = process.wait(5) if not piece else 0
                if not piece and not stage and code == 0:
                    raise _Gone
                self.end()
                limit = f"{self.memory_bytes / 2**30:.0f} GB of memory"
                raise Ended(f"{stage or 'it'}: reading ended the process (status {code}; {limit})")
            *lines, pending = pending.split(b"\n")
            for text in lines:
                kind, value = json.loads(text)
                if kind == "stage":
                    stage = value
                elif kind == "memory":
                    self.end()
                    limit = f"{self.memory_bytes / 2**30:.0f} GB"
                    raise Ended(f"{stage or 'it'}: reading takes more than {limit} of memory")
                elif kind == "error":
                    raise Ended(f"{stage or 'it'}: {value}")
                else:
                    return value

    def end(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class _Gone(Exception):
    """The child ended by itself between two requests."""


_output: Any = None


def stage(name: str) -> None:
    """Say what is read next; outside of a child this does nothing."""
    if _output is not None:
        _send("stage", name)


def _send(kind: str, value: Any) -> None:
    _output.write(json.dumps([kind, value]).encode() + b"\n")
    _output.flush()


def main(of: str, memory_bytes: int) -> None:
    """Answer requests from standard input until it ends or none has come for a while."""
    global _output  # stages are reported from anywhere below
    _output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    resource.setrlimit(getattr(resource, f"RLIMIT_{of}"), (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while select.select([sys.stdin], [], [], _IDLE_S)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        name, arguments = json.loads(line)
        module, _, function = name.partition(":")
        try:
            _send("value", getattr(importlib.import_module(module), function)(**arguments))
        except MemoryError:
            _send("memory", "")
        except Exception as error:  # of any library, over any file
            _send("error", f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    from workloads.inspection import process  # the module that others import, not __main__

    process.main(sys.argv[1], int(sys.argv[2]))
