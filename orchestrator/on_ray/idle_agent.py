"""A process in the place of one of Ray's agents: it does nothing, and ends with its node.

`python -I -S idle_agent.py`, started by the node's raylet, which needs a child to watch.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    raylet = os.environ.get("RAY_RAYLET_PID", str(os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) == raylet:  # else it died before that, and there is no signal
        signal.pause()
