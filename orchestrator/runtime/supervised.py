"""The driver's side of its supervisor (``supervisor.py``): the messages in both directions.

A driver learns from one environment variable that it has a supervisor, and says over a pipe which
run it drives and that an exit code is its own. It dies with its supervisor, as everything that a
driver starts dies with the driver: whoever kills the process that was typed has killed the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Holds a ``Charge`` as JSON.
VARIABLE = "NIGHTGRID_SUPERVISED"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Facts that a supervisor tells its driver."""

    supervisor: int  # process id
    pipe: int  # where to tell facts, a JSON object a line
    began: float  # when the command was typed, seconds since the epoch
    ends_at: float | None = None  # when the report must be there, seconds since the epoch
    life: int = 1  # the number of this driver
    cards: Mapping[str, int] = field(default_factory=dict)  # by kind, as the first driver saw them
    succeeded: bool = False  # whether a job has, under a driver before this one

    @property
    def again(self) -> bool:
        """Return whether a driver before this one has died."""
        return self.life > 1

    def variables(self) -> dict[str, str]:
        """Variables for the driver's environment."""
        return {VARIABLE: json.dumps(asdict(self))}

    def tell(self, **facts: Any) -> None:
        """Tell the supervisor something. It may be dead, and then this process is soon."""
        with contextlib.suppress(OSError):
            os.write(self.pipe, json.dumps(facts).encode() + b"\n")


def take_charge() -> Charge | None:
    """Become the driver of a supervisor, if this process was started as one. What it starts itself
    does not learn of it."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None
    charge = Charge(**json.loads(text))
    os.set_inheritable(charge.pipe, False)
    # A group of its own: the terminal's Ctrl-C reaches the supervisor, who passes each one on. Such
    # a process may be stopped for writing to the terminal, unless it ignores the signal.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != charge.supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    return charge
