"""The agent's handle of a worker process (``main.py``). No Ray here.

A crash, kill or hang of the process becomes a ``RankOutcome`` with the signal and the log's end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

from orchestrator.core.events import Progress
from orchestrator.core.job import State
from orchestrator.core.outcome import (
    Attempt,
    Failure,
    FailureClass,
    RankOutcome,
    WorkerInfo,
    classify,
)
from orchestrator.util.format import one_line
from orchestrator.util.host import Interval
from orchestrator.util.redaction import redact, redacted_end
from orchestrator.worker.layers import layer_if_made, make_layer, path_with
from orchestrator.worker.protocol import TAIL_BYTES, Run, Start
from orchestrator.worker.spawn import SpawnedProcess
from workloads.engines import split_kind
from workloads.util import files

#: Read before the tail, to redact a key of many lines as a whole.
_BEFORE_TAIL_BYTES = 1 << 16


class WorkerProcess:
    """One thread calls ``start``, ``listen``, ``run``; any may read ``progress`` or ``stop`` it."""

    def __init__(self, request: Start) -> None:
        self._request = request
        self._config = request.config
        self._process: SpawnedProcess | None = None
        self._channel: Connection | None = None
        #: The process's last report of its activity; None when it is idle.
        self.progress: Progress | None = None
        self._info: WorkerInfo | None = None
        self._stop_reason: str | None = None
        self._gone = threading.Event()
        self._exit: Mapping[str, Any] = {}
        #: Start and end of the timed part of the last rank, on this host's monotonic clock.
        self.timed: tuple[float, float] | None = None

    def start(self) -> WorkerInfo | Failure:
        """Start the process and wait until it is ready; a Failure means that it is gone."""
        if self._stop_reason is not None:
            self._gone.set()
            return self._death("start")
        kind, software = split_kind(self._config.kind)
        layer = layer_if_made(software) if software else None
        if software and self._config.world_size > 1:  # now, since other ranks would wait for it
            with contextlib.suppress(Exception):  # ``run`` gives the reason
                layer = make_layer(software, lambda: self._stop_reason is not None)
        if layer is None and software:  # made for the first job, whose row says where that fails
            self._config = replace(self._config, kind=kind)
        mine, theirs = Pipe()
        environment = dict(os.environ) | dict(self._request.environments[kind])
        try:
            self._process = SpawnedProcess(
                self._request.server,
                environment=environment | path_with(layer, sys.path),
                log=self._request.log,
                channel=theirs.fileno(),
                fresh=layer is not None,
            )
        except (OSError, EOFError) as error:
            self._gone.set()
            message = f"the node's spawner does not answer: {error!r}"
            return Failure(FailureClass.NODE_LOST, message)
        finally:
            theirs.close()
        threading.Thread(target=self._watch, daemon=True).start()
        self._channel = mine
        if self._stop_reason is not None:  # stopped while it was being started
            self._process.kill()
        try:
            self._channel.send((self._request.factory, self._config))
            kind, value = self._receive()
        except (EOFError, OSError):
            return self._death("start-up")
        if kind == "failed":
            self._gone.wait()
            return self._with_log(value)
        if self._stop_reason is not None:  # it answered before it was killed
            return self._death("start-up")
        self._info = value
        return value

    def listen(self, address: str) -> Any:
        """Have rank 0 open a rendezvous on ``address``; return it or a Failure."""
        try:
            return self._ask("listen", address)[1]
        except (EOFError, OSError):
            return self._death("opening a rendezvous")

    def run(self, request: Run) -> bytes | RankOutcome:
        """Run one rank to its end; return the process's pickled RankOutcome, else one made here."""
        attempt, failure = request.attempt, request.rendezvous
        lasted = Interval()
        self.timed = None
        self.progress = Progress(  # until the process says more, which a hang may keep it from
            worker_id=self._request.worker_id, attempt_id=attempt.attempt_id, phase="start"
        )
        try:
            if not isinstance(failure, Failure):
                failure = self._become(attempt)
            if not isinstance(failure, Failure):
                kind, value = self._ask("run", attempt, request.rank, request.rendezvous)
                if kind != "failed":
                    outcome: bytes
                    self.timed, outcome = value
                    return outcome
                failure = value
        except (EOFError, OSError):
            failure = self._death(attempt.job.label)
        finally:
            self.progress = None
        taken_away = self._stop_reason is not None or "spawner_lost" in self._exit
        return RankOutcome(
            rank=request.rank,
            state=State.LOST if taken_away else State.FAILED,
            started_at=lasted.started_at,
            ended_at=lasted.until_now(),
            failure=failure,
            worker=self._info,
        )

    def stop(self, reason: str) -> None:
        """Kill the process and its children and wait until they are gone."""
        if self._stop_reason is None and not self._gone.is_set():  # else it died of itself
            self._stop_reason = reason
        self._kill()

    @property
    def pid(self) -> int | None:
        """Number of the process; None where none was started."""
        return self._process.pid if self._process is not None else None

    @property
    def gone(self) -> bool:
        """Return whether the process and its children are gone."""
        return self._gone.is_set()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._gone.wait()

    def _become(self, attempt: Attempt) -> Failure | None:
        """Replace a process of another kind: engines, card modes and software are fixed at
        import."""
        kind = attempt.job.process_kind
        ordinary, software = split_kind(kind)
        if kind == self._config.kind or ordinary not in self._request.environments:
            return None  # a kind that this card never has is for the worker to refuse
        if software:  # made by the first job that needs it
            before = self.progress
            self.progress = Progress(
                worker_id=self._request.worker_id, attempt_id=attempt.attempt_id, phase="install"
            )
            try:
                make_layer(software, lambda: self._stop_reason is not None)
            except Exception as error:
                if self._stop_reason is not None:
                    return self._death(f"installing {software}")
                return Failure(classify(error), one_line(redact(str(error), os.environ), 2000))
            self.progress = before
        self._kill()
        environment = self._request.environments[ordinary]
        self._config = replace(self._config, kind=kind, environment=environment)
        self._exit = {}
        self._gone = threading.Event()  # of the new one, before anybody can wait for it
        started = self.start()
        if not isinstance(started, Failure):
            return None
        if software and started.failure_class is FailureClass.IMPORT:  # as it would be anywhere
            message = f"the node's packages do not work with {software}: {started.message}"
            return replace(started, failure_class=FailureClass.BAD_CONFIGURATION, message=message)
        return started

    def _ask(self, method: str, *arguments: Any) -> tuple[str, Any]:
        if self._channel is None:
            raise EOFError("the process was never started")
        self._channel.send((method, arguments))
        return self._receive()

    def _receive(self) -> tuple[str, Any]:
        assert self._channel is not None
        while True:
            kind, value = self._channel.recv()
            if kind != "progress":
                return kind, value
            self.progress = value

    def _watch(self) -> None:
        assert self._process is not None
        try:
            self._exit = self._process.wait()
        except (OSError, EOFError, ValueError):
            self._exit = {"spawner_lost": True}
        self._gone.set()

    def _death(self, doing: str) -> Failure:
        """Wait for the end of the process and describe it."""
        if not self._gone.wait(5):
            self._kill()  # it closed its channel and lives on
        if self._stop_reason is not None:
            return self._with_log(Failure(FailureClass.HANG, f"stopped: {self._stop_reason}"))
        status = self._exit.get("exit", 0)
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        failure_class, text = FailureClass.CRASH, f"the worker process {how}"
        if self._exit.get("host_oom"):
            failure_class = FailureClass.HOST_OUT_OF_MEMORY
            text = "the kernel killed the worker for want of host memory"
        elif "spawner_lost" in self._exit:
            failure_class = FailureClass.NODE_LOST
            text = "the node's spawner ended, and with it the worker,"
        return self._with_log(Failure(failure_class, f"{text} during {doing}"))

    def _with_log(self, failure: Failure) -> Failure:
        kind, _ = split_kind(self._config.kind)
        environment = {**os.environ, **self._request.environments.get(kind, {})}
        return replace(
            failure,
            tail=failure.tail or tail_of(self._request.log, environment),
            log=f"{socket.gethostname()}:{self._request.log}",
        )


def tail_of(log: str, environment: Mapping[str, str]) -> str:
    """Last lines of a log file without the secrets of ``environment``; empty if unreadable."""
    try:
        with files.opened(log, follow=False) as file:
            start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES - _BEFORE_TAIL_BYTES)
            file.seek(start)
            data = file.read(TAIL_BYTES + _BEFORE_TAIL_BYTES)
    except OSError:
        return ""
    text = data.decode("utf-8", errors="replace")
    return redacted_end(text, TAIL_BYTES, environment, cut=start > 0)
