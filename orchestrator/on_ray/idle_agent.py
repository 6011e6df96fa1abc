"""A process in the place of one of Ray's agents: it does nothing, and ends with its node.

`python -I -S idle_agent.py`, started by the node's raylet, which needs a child to watch.
"""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pause()
