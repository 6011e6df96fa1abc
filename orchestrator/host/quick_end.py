"""The end of a process without taking its interpreter apart.

With Ray and Arrow imported, that takes a third of a second, at the end of which memory is free that
the kernel frees anyway.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading


def end_quickly(code: int) -> None:
    """End this process with an exit code once it has nothing left to do: what it printed is out,
    and what libraries registered for its end is done. Returns where a thread still has to be waited
    for, or output cannot be written: the ordinary end deals with both."""
    alive = (each for each in threading.enumerate() if each is not threading.main_thread())
    run_all = getattr(atexit, "_run_exitfuncs", None)
    if run_all is None or not all(each.daemon for each in alive):
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        run_all()
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return
    os._exit(code)
