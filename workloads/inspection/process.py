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
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

#: Limits of a request: CPU time, so that its answer comes within 10 s on a quiet host, and memory
#: beside what the process has when the request comes.
SECONDS, BYTES = 8.0, 2**30
#: How many times its CPU time a request may take, on a busy host or a slow file system.
_PATIENCE = 6
#: A library that it has imported took seconds, which the next request need not wait for again.
_IDLE_S = 60.0
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
        self._limits = (of, str(memory_bytes))
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._owner = 0
        self._lock = threading.Lock()
        atexit.register(self.end)

    def call(self, function: str, **arguments: Any) -> Any:
        """Return what ``module:function`` returns, both ways as JSON; raises Ended if it took too
        long or too much memory, or died."""
        request = json.dumps([function, arguments, os.getcwd(), self.seconds]).encode()
        with self._lock:
            for _ in range(2):
                process = self._running()
                with contextlib.suppress(BrokenPipeError, _Idle):
                    self._pipe.send_bytes(request)
                    return self._answer(process)
                self.end()  # it was idle for too long just now
        raise Ended("the process that reads ended at once")

    def _running(self) -> subprocess.Popen[bytes]:
        mine = self._owner == os.getpid()
        if self._process is None or not mine or self._process.poll() is not None:
            self.end()
            self._owner = os.getpid()
            self._pipe, theirs = Pipe()
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, *self._limits, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # what libraries print is no answer
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": paths},
                    pass_fds=(theirs.fileno(),),
                )
        return self._process

    def _answer(self, process: subprocess.Popen[bytes]) -> Any:
        reading = "it"
        until = time.monotonic() + _PATIENCE * self.seconds
        while True:
            if not self._pipe.poll(max(until - time.monotonic(), 0)):
                self.end()
                raise Ended(f"{reading}: reading took more than {_PATIENCE * self.seconds:.0f} s")
            try:
                kind, value = json.loads(self._pipe.recv_bytes(_ANSWER_BYTES))
            except (EOFError, OSError):  # it ended, or says too much
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                self.end()
                if process.returncode == 0 and reading == "it":
                    raise _Idle from None
                code = process.returncode
                ended = f"ended the process (status {code})"
                if code == -signal.SIGXCPU:
                    ended = f"took more than {self.seconds:.0f} s of CPU time"
                raise Ended(f"{reading}: reading {ended}") from None
            if kind == "error":
                raise Ended(f"{reading}: {value}")
            if kind == "value":
                return value
            reading = value

    def end(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            self._pipe.close()
            process.kill()
            process.wait()


class _Idle(Exception):
    """The child ended by itself between two requests."""


_pipe: Connection | None = None


def stage(name: str) -> None:
    """Say what is read next; outside of a child this does nothing."""
    if _pipe is not None:
        _pipe.send_bytes(json.dumps(["stage", name]).encode())


def main(of: str, memory_bytes: int, descriptor: int) -> None:
    """Answer requests from a pipe until it ends or none has come for a while."""
    global _pipe  # stages are reported from anywhere below
    _pipe = Connection(descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    exhausted = False  # what a request without memory left behind would be the next one's
    while not exhausted and _pipe.poll(_IDLE_S):
        answer: tuple[str, Any]
        try:
            name, arguments, directory, seconds = json.loads(_pipe.recv_bytes())
        except EOFError:
            return
        module, _, function = name.partition(":")
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0 if of == "AS" else 5])
        most = memory_bytes + pages * resource.getpagesize()
        resource.setrlimit(getattr(resource, f"RLIMIT_{of}"), (most, resource.RLIM_INFINITY))
        used = sum(os.times()[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds), resource.RLIM_INFINITY))
        try:
            os.chdir(directory)
            value = getattr(importlib.import_module(module), function)(**arguments)
            answer = ("value", value)
        except MemoryError:
            answer = ("error", f"reading takes more than {memory_bytes / 2**30:.0f} GB of memory")
            exhausted = True
        except Exception as error:  # of any library, over any file
            answer = ("error", f"{type(error).__name__}: {error}"[:500])
        _pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    from workloads.inspection import process  # the module that others import, not __main__

    process.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
