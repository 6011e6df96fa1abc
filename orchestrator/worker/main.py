"""Entry point of a worker process: one per card, warm between attempts.

It builds the worker that its agent (``process.py``) names, answers requests and reports its phase.
It imports no Ray and, before the first attempt, no torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.outcome import Failure, classify
from orchestrator.util.format import one_line
from orchestrator.util.host import complete_environment
from orchestrator.util.redaction import finish_output, redact, redact_output
from orchestrator.worker.protocol import pickled

_REPORT_INTERVAL_S = 0.25


def serve(handle: int) -> int:
    """Build a worker and answer requests until the channel closes; the process's exit status."""
    complete_environment()
    redact_output(os.environ)
    try:
        return _serve(Connection(handle))
    finally:
        finish_output()


def _serve(channel: Connection) -> int:
    streams = _Streams()
    factory, config = channel.recv()
    module, _, name = factory.partition(":")
    worker: Any = None  # made by ``factory``, as ``worker.CardWorker`` is
    try:
        worker = getattr(importlib.import_module(module), name)(config)
        info = worker.start()
    except Exception as error:
        _print_traceback()
        if worker is None:
            message = one_line(redact(str(error), os.environ), 2000) or type(error).__name__
            channel.send(("failed", Failure(classify(error), message)))
        else:
            channel.send(("failed", worker.failure(error)))
        return 1
    channel.send(("answer", info))
    sending = threading.Lock()
    threading.Thread(target=_report, args=(worker, channel, sending), daemon=True).start()
    while True:
        try:
            method, arguments = channel.recv()
        except (EOFError, ConnectionResetError):  # the latter with something unread there
            return 0
        try:
            if method == "listen":
                answer = "answer", worker.listen(*arguments)
            else:
                outcome = worker.run(*arguments)
                answer = "answer", (outcome.timed, pickled(outcome))
        except Exception as error:
            _print_traceback()
            answer = "failed", worker.failure(error)
        streams.restore()
        with sending:
            channel.send(answer)


class _Streams:
    """Standard output and error as they were before a job, which may close or replace them."""

    def __init__(self) -> None:
        self._streams = sys.stdout, sys.stderr
        self._files = [os.dup(handle) for handle in (1, 2)]

    def restore(self) -> None:
        """Flush the job's output and restore the original streams."""
        streams = (sys.stdout, sys.stderr, *self._streams)
        for stream in {id(stream): stream for stream in streams}.values():
            with contextlib.suppress(Exception):
                stream.flush()
        for handle, file in enumerate(self._files, 1):
            os.dup2(file, handle)
        sys.stdout, sys.stderr = self._streams


def _print_traceback() -> None:
    """Print the error that is being handled; the job may have closed or replaced the stream."""
    with contextlib.suppress(Exception):
        traceback.print_exc()


def _report(worker: Any, channel: Connection, sending: threading.Lock) -> None:
    """Send each change of phase; a process that is stuck has reported where."""
    last: Progress | None = None
    while True:
        time.sleep(_REPORT_INTERVAL_S)
        now = worker.progress()
        if now != last:
            last = now
            with contextlib.suppress(OSError), sending:
                channel.send(("progress", now))


if __name__ == "__main__":
    # This module is __main__ here; what it sends must be of the importable one.
    from orchestrator.worker.main import serve as importable_serve

    sys.exit(importable_serve(int(sys.argv[1])))
