"""Measure every Python process that a measured test starts; on its path, this module is imported
at the start of each. What such a process has executed is saved every other second too, since many
end by a signal."""

import contextlib
import os
import threading
import time


def _save_now_and_then(coverage: object) -> None:
    while True:
        time.sleep(2.0)
        with contextlib.suppress(Exception):  # what is measured may not notice
            coverage.save()  # type: ignore[attr-defined]


def _measure() -> None:
    try:
        import coverage
    except ImportError:  # an environment of a test's own
        return
    measured = coverage.process_startup()
    if measured is not None and os.environ.get("DEFECTS_TEST"):
        threading.Thread(target=_save_now_and_then, args=[measured], daemon=True).start()


_measure()
