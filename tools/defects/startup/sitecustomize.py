"""Measure every Python process that a measured test starts; on its path, this module is imported
at the start of each. What a process has executed is saved every other second too, since many end
by a signal."""

import threading
import time


def _save_now_and_then(coverage: object) -> None:
    while True:
        time.sleep(2.0)
        coverage.save()  # type: ignore[attr-defined]


def _measure() -> None:
    try:
        import coverage
    except ImportError:  # an environment of a test's own
        return
    if (measured := coverage.process_startup()) is not None:
        threading.Thread(target=_save_now_and_then, args=[measured], daemon=True).start()


_measure()
