"""The process that watches a driver: ``nightgrid run`` on a cluster or on emulated cards.

Ray can end the process that uses it, from C++, without an exception; so can a kernel that is out of
memory. The driver is therefore a child of a small process that imports neither Ray nor torch. It
passes signals and the exit code on. When a driver dies without a word it has what was measured
reported, tells who asked (``--notify``), waits until the cluster answers, and starts the same
command again, which goes on with the run. ``supervision.py`` decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from orchestrator.exit_codes import INTERRUPTED
from orchestrator.host import output
from orchestrator.results import paths
from orchestrator.runtime.supervised import Charge
from orchestrator.runtime.supervision import (
    AT_ONCE,
    HEAD_PATIENCE_S,
    GiveUp,
    Life,
    Return,
    decide,
    exit_code,
)

#: A driver that is asked for the third time ends by itself within ten seconds (``driver.py``).
FORCE_AFTER_S = 20.0
_ASK_HEAD_S = 5.0
_CONNECT_S = 5.0
_AFTERMATH_S = 600.0


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Watches the drivers of one run, one after the other.

    Attributes:
        command: the driver's; with ``VARIABLE`` set it takes charge.
        notify: the hooks, as they were typed.
        ends_at: when the report must be there, seconds since the epoch.
        aftermath: the command that reports and notifies; it gets a JSON object on standard input.
    """

    command: Sequence[str]
    notify: Sequence[str] = ()
    ends_at: float | None = None
    aftermath: Sequence[str] = (sys.executable, "-m", "orchestrator.runtime.aftermath")
    _began: float = field(default_factory=time.time)
    _facts: dict[str, Any] = field(default_factory=dict)  # what drivers told, the newest last
    _lives: list[Life] = field(default_factory=list)
    _driver: subprocess.Popen[bytes] | None = None
    _stops: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Run drivers until one has had its say; its exit code."""
        with self._signals():
            while True:
                self._lives.append(self._live())
                decision = decide(
                    self._lives, stops=self._stops, now=time.time(), ends_at=self.ends_at
                )
                if isinstance(decision, Return):
                    return self._as_it_ended(decision.code)
                fate = self._lives[-1].fate
                if isinstance(decision, GiveUp):
                    _say(f"{fate}; {decision.reason}. The same command resumes the run.")
                    self._report("failed", f"{fate}; {decision.reason}", decision.code)
                    return decision.code
                _say(f"{fate}. What was measured is safe; another driver goes on with the run")
                if self._is_news():
                    self._report("interrupted", f"{fate}; it is started again", None)
                trouble = self._wait(decision.pause_s)
                if trouble:
                    _say(f"{trouble}. The same command resumes the run.")
                    code = INTERRUPTED if self._stops else 3
                    ending = "stopped" if self._stops else "failed"
                    self._report(ending, f"{fate}; {trouble}", code)
                    return code

    # ------------------------------------------------------------ one driver

    def _live(self) -> Life:
        """Start a driver and wait for its end."""
        reading, writing = os.pipe()
        charge = Charge(
            supervisor=os.getpid(),
            pipe=writing,
            began=self._began,
            ends_at=self.ends_at,
            life=len(self._lives) + 1,
            cards=self._facts.get("cards", {}),
            succeeded=bool(self._facts.get("succeeded")),
        )
        rows_before = self._rows_changed()
        for known in ("drives", "ended", "again"):
            self._facts.pop(known, None)
        self._driver = subprocess.Popen(
            self.command, env=os.environ | charge.variables(), pass_fds=[writing]
        )
        os.close(writing)
        if self._stops:  # the signal came before there was anybody to pass it on to
            self._driver.terminate()
        with os.fdopen(reading, "rb") as pipe:
            # Until the driver has closed it; what it starts does not inherit the pipe.
            for line in pipe:
                with contextlib.suppress(ValueError):
                    self._facts.update(json.loads(line))
        returncode = self._driver.wait()
        self._driver = None
        return Life(
            returncode=returncode,
            own_end=self._facts.get("ended") == returncode,
            drove=bool(self._facts.get("drives")),
            wrote_rows=self._rows_changed() != rows_before,
            why_again=str(self._facts.get("again", "")),
        )

    def _as_it_ended(self, code: int) -> int:
        """The exit code; a signal that ended the driver, as it was asked to, ends this process."""
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        return code

    def _rows_changed(self) -> int:
        """Time at which a file of rows last came or went, as the file system counts; 0 if there is
        none."""
        with contextlib.suppress(OSError, KeyError):
            return os.stat(Path(self._facts["results"], self._facts["run"], paths.ROWS)).st_mtime_ns
        return 0

    # ------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass on what asks for an end, and be stopped and continued together with the driver."""
        handlers = {
            signal.SIGINT: self._stop,
            signal.SIGTERM: self._stop,
            signal.SIGTSTP: self._suspend,
            signal.SIGCONT: self._continue,
        }
        before = {number: signal.signal(number, act) for number, act in handlers.items()}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._stops += 1
        self._stopped.set()
        self._pass_on(number)
        if self._stops == AT_ONCE:
            force = threading.Timer(FORCE_AFTER_S, self._pass_on, [signal.SIGKILL])
            force.daemon = True
            force.start()

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        self._pass_on(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _continue(self, _number: int, _frame: FrameType | None) -> None:
        self._pass_on(signal.SIGCONT)

    def _pass_on(self, number: int) -> None:
        driver = self._driver
        if driver is not None:
            driver.send_signal(number)

    # ------------------------------------------------------------ between two drivers

    def _is_news(self) -> bool:
        """Return whether the last driver's death is the first since rows were written: the user is
        told once of a head that is away, not of each driver that does not find it."""
        before = self._lives[-2:-1]
        return not before or before[0].wrote_rows or self._lives[-1].wrote_rows

    def _report(self, ending: str, reason: str, code: int | None) -> None:
        """Have the page written and the hooks told, by a process of its own: both need what this
        one does not import. A failure of it is said by itself."""
        if "run" not in self._facts:
            return
        told = {
            "run": self._facts["run"],
            "results": self._facts["results"],
            "notify": list(self.notify),
            "ending": ending,
            "reason": reason,
            "exit_code": exit_code(self._lives[-1]) if code is None else code,
        }
        try:
            subprocess.run(
                self.aftermath,
                input=json.dumps(told).encode(),
                stdout=subprocess.DEVNULL,
                timeout=_AFTERMATH_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _say(f"the report could not be written: {error}")

    def _wait(self, pause_s: float) -> str:
        """Wait for a pause, then for the cluster to answer; why there is no point in going on, if
        there is none."""
        if self._stopped.wait(pause_s):
            return "an end was asked for"
        address = str(self._facts.get("address") or "")
        if not address:
            return ""
        limit = time.monotonic() + HEAD_PATIENCE_S
        waiting = False
        while not answers(address):
            if not waiting:
                _say(f"waiting for the cluster's head: nothing answers at {address}")
                waiting = True
            if self._stopped.wait(_ASK_HEAD_S):
                return "an end was asked for while the cluster's head was away"
            if self.ends_at is not None and time.time() > self.ends_at:
                return f"nothing answered at {address} before the deadline"
            if time.monotonic() > limit:
                return f"nothing answered at {address} for {HEAD_PATIENCE_S / 3600:.0f} h"
        if waiting:
            _say(f"{address} answers")
        return ""


def answers(address: str) -> bool:
    """Return whether something listens at ``host:port``; anything else is taken for an answer,
    since a driver says best what is wrong with it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    output.say_aside(f"nightgrid run: {text}")
